"""FLOPs counted while a real step runs, once: for models that no formula fits.

Some things make torch's counter disagree with what a model asks for, and are put right here:

- On a CPU it does not know the fused attention and counts nothing for it.
- It counts the scores that a fused attention computes a second time in its backward pass, and the
  layers that activation checkpointing computes again. Both are the trainer's choice, not work for
  the model. The checkpointed layers are told apart by where they run: inside the backward pass,
  with gradients enabled. (So a backward pass with `create_graph=True` cannot be counted.)
- It ignores causal masks; what fused attention had one is kept apart and can count half.

Kernels outside torch (custom Triton, the flash-attn package) are invisible to it; use the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from distmon.telemetry.mfu.model_flops import ModelFlops
from distmon.telemetry.mfu.unavailable import MfuUnavailableError

# Query, key and value are (batch, heads, tokens, size) in all of them.
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class UsefulFlops:
    """Counts what runs inside it: `with UsefulFlops() as counted: loss(batch).backward()`.

    That step takes 2 to 20 times as long. Leave the optimizer's step out: some multiply matrices.
    """

    def __init__(self) -> None:
        self.causal_attention = 0
        """Share of `total` in fused attention with a causal mask, counted without a discount."""
        self.recomputed = 0
        """FLOPs that were done a second time, which `total` does not have."""
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
        """FLOPs of the useful work, attention without a causal discount."""
        return int(self._counter.get_total_flops())

    def per_token(self, tokens: float, causal: bool) -> ModelFlops:
        """`tokens` are those that went through what was counted, all micro-batches together."""
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
        """The formula, worth nothing while a layer is computed again.

        `causal_at` is the place of the argument that says whether there is a causal mask.
        """

        def count(*args: Any, **kwargs: Any) -> int:
            try:
                flops = int(formula(*args, **kwargs))
            except Exception as error:  # this runs inside the user's training step
                self._obstacle = f"counting FLOPs failed: {error}"
                return 0
            # Such a tensor has the sizes of the whole, while attention runs on plain parts of it.
            if any(hasattr(argument, "device_mesh") for argument in args):
                self._obstacle = (
                    "layers are split over devices, and one of them sees a part of attention only"
                )
            if self._counter.mod_tracker.is_bw and torch.is_grad_enabled():
                self.recomputed += flops
                return 0
            if causal_at is not None and (
                args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
            ):
                self.causal_attention += flops
            return flops

        # How the counter knows that a formula wants the tensors and not only their shapes.
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
    """Scores and the mix of values; grouped keys are compared with every query head."""
    batch, heads, tokens, size = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(_: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Two products for each one forward; scores that are computed again do not count."""
    return 2 * _attention(*args, **kwargs)
