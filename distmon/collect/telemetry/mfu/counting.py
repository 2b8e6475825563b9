"""Count FLOPs in one real training step, for models that no formula fits.

torch's FlopCounterMode differs from the model's own FLOPs in three ways, which are corrected here:

- On a CPU it has no formula for fused attention and counts 0.
- It counts recomputation: the scores that fused attention recomputes in its backward pass, and the
  layers that activation checkpointing recomputes. Checkpointed layers are recognized because they
  run inside the backward pass with gradients enabled. (So a backward pass with
  `create_graph=True` cannot be counted.)
- It ignores causal masks; fused attention with a causal mask is counted separately, so that it can
  count half.

Kernels outside torch (custom Triton, the flash-attn package) are not counted; use the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from distmon.collect.telemetry.mfu.model_flops import ModelFlops
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

# Query, key and value are (batch, heads, tokens, size) in all of them.
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class UsefulFlops:
    """Counts the FLOPs inside its context: `with UsefulFlops() as counted: loss(batch).backward()`.

    The step takes 2 to 20 times as long. Do not include the optimizer step: some optimizers
    multiply matrices.
    """

    def __init__(self) -> None:
        self.causal_attention = 0
        """The part of `total` in fused attention with a causal mask, counted in full."""
        self.recomputed = 0
        """FLOPs of recomputation, which are not in `total`."""
        self._obstacle: str | None = None
        formulas = {op: self._useful(formula) for op, formula in flop_registry.items()}
        for name in _FUSED_ATTENTION:
            for suffix, formula in (("", _attention), ("_backward", _attention_backward)):
                op = getattr(torch.ops.aten, name + suffix, None)
                if op is not None:  # not every version of torch has all of them
                    arguments = [argument.name for argument in op.default._schema.arguments]
                    formulas[op] = self._useful(formula, arguments.index("is_causal"))
        self._counter = FlopCounterMode(display=False, custom_mapping=formulas)

    def __enter__(self) -> Self:
        self.causal_attention = self.recomputed = 0
        self._obstacle = None
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._counter.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> int:
        """Useful FLOPs, with causal attention counted in full."""
        return int(self._counter.get_total_flops())

    def per_token(self, tokens: float, causal: bool) -> ModelFlops:
        """Return FLOPs per token; `tokens` are those of all counted micro-batches.

        Raises MfuUnavailableError when nothing could be counted.
        """
        if not tokens > 0:
            raise MfuUnavailableError(
                "no MFU: the counted step had no tokens; pass them to step(tokens=...)"
            )
        if not self.total:
            self._obstacle = self._obstacle or "nothing was counted in a training step"
        if self._obstacle:
            raise MfuUnavailableError(
                f"no MFU: {self._obstacle}; set mfu.model or mfu.flops_per_token"
            )
        if not causal:
            words = "full attention"
        elif self.causal_attention:
            words = "causal attention"
        else:
            words = "no causal attention seen"
        return ModelFlops(
            (self.total - (self.causal_attention / 2 if causal else 0)) / tokens,
            f"counted in one step, {words}",
            causal and self.causal_attention > 0,
        )

    def _useful(
        self, formula: Callable[..., int], causal_at: int | None = None
    ) -> Callable[..., int]:
        """Wrap a formula so that recomputation counts 0.

        `causal_at` is the position of the argument `is_causal`.
        """

        def count(*args: Any, **kwargs: Any) -> int:
            try:
                flops = int(formula(*args, **kwargs))
            except Exception as error:  # this runs inside the user's training step
                self._obstacle = f"counting FLOPs failed: {error}"
                return 0
            # Such a tensor has the global shape, while attention runs on local tensors.
            if any(hasattr(argument, "device_mesh") for argument in args):
                self._obstacle = (
                    "layers are sharded over devices, and each device sees only part of attention"
                )
            if self._counter.mod_tracker.is_bw and torch.is_grad_enabled():
                self.recomputed += flops
                return 0
            if causal_at is not None and (
                args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
            ):
                self.causal_attention += flops
            return flops

        # Tells the counter that the formula takes tensors, not only their shapes.
        count._get_raw = True  # type: ignore[attr-defined]
        return count


def count_flops(step: Callable[[], object], tokens: float, causal: bool) -> ModelFlops:
    """Run `step` (forward and backward of `tokens` tokens) and count its useful FLOPs per token."""
    with UsefulFlops() as counted:
        step()
    return counted.per_token(tokens, causal)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    """Return the FLOPs of scores and weighted values; grouped keys count for every query head."""
    batch, heads, tokens, size = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(_: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Return twice the forward FLOPs; recomputed scores do not count."""
    return 2 * _attention(*args, **kwargs)
