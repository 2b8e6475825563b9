"""How a router distributes tokens over its experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling

from distmon.collect.gradient_gain.in_graph import never_compile_alone, register_effect
from distmon.collect.inside.catalog import EXPERT_SUMS
from distmon.collect.inside.tables import Watching
from distmon.collect.own_hooks import OwnHook
from distmon.layout import local_part

_CHOICES: Final = ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token")
_TOKENS, _DROPPED = EXPERT_SUMS.index("tokens"), EXPERT_SUMS.index("dropped")


class RouterHook(OwnHook):
    """Forward hook that adds the tokens of each expert to the row of a router.

    Reads what routers return: the chosen experts of each token (Hugging Face, torchtitan), tokens
    by expert and a mask of those that are dispatched (DeepSpeed), or logits, of which the largest
    are chosen.
    """

    def __init__(
        self,
        watching: Watching,
        sums: torch.Tensor,
        place: tuple[int, int],
        modules: Sequence[nn.Module | None],
    ) -> None:
        """`place`: number of experts, and where the row begins in `sums`.

        `modules`: the router and the module that holds it, which say how many experts are chosen.
        """
        self.watching = watching
        self._experts, begin = place
        self._sums = sums[begin : begin + len(EXPERT_SUMS) + self._experts]
        self._sums.router = self  # type: ignore[attr-defined]
        torch._dynamo.mark_static_address(self._sums)
        # `data` has a version of its own: autograd may have saved the row for a compiled graph.
        data, columns = self._sums.data, len(EXPERT_SUMS)
        self._row, self._loads = data[:columns], data[columns:]
        self._chosen = _chosen_experts(modules, self._experts)
        self._traceable = operator_library() is not None
        never_compile_alone(RouterHook.__call__, RouterHook.add, _tensors)

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        # In this order: a compiler that reads the switch would recompile when it changes.
        if is_compiling():
            if module.training and torch.is_grad_enabled() and self._traceable:
                found = [t.detach() for t in _tensors(output) if type(t) is torch.Tensor]
                torch.ops.distmon.add_routing(found, self._sums)
        elif self.watching.armed:
            try:
                if self.watching.counts(module.training, self._sums.device):
                    self.add(_tensors(output))
            except Exception as error:  # never into the forward pass of the user
                self.watching.failed(error, self._row, self._loads)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add what the router returned for a batch."""
        begin = perf_counter()
        try:
            with torch.no_grad():
                parts = (local_part(tensor.detach()) for tensor in tensors)
                self._add([part[0] for part in parts if part is not None])
        except Exception as error:
            self.watching.failed(error, self._row, self._loads)
        self.watching.seconds += perf_counter() - begin

    def _add(self, tensors: Sequence[torch.Tensor]) -> None:
        experts = self._experts
        whole = [t for t in tensors if not (t.is_floating_point() or t.dtype == torch.bool)]
        indices = next((t for t in whole if t.dim() > 1 and t.shape[-1] <= experts), None)
        counts = next((t for t in whole if t.shape == (experts,)), None)
        if indices is None and counts is None:
            wide = (t for t in tensors if t.is_floating_point() and t.dim() > 1)
            logits = next((t for t in wide if t.shape[-1] == experts), None)
            if logits is None:
                return
            indices = logits.topk(self._chosen, dim=-1).indices
        if indices is not None:
            chosen = indices.reshape(-1).to(torch.int64)
            # Some routers mark a dropped token by an index that is no expert; on a GPU, adding
            # there would end the process.
            real = (chosen >= 0) & (chosen < experts)
            self._loads.scatter_add_(0, chosen.clamp(0, experts - 1), real.to(self._loads.dtype))
            self._row[_TOKENS] += indices.numel() // max(1, indices.shape[-1])
            self._row[_DROPPED] += chosen.numel() - torch.count_nonzero(real)
            return
        assert counts is not None
        self._loads += counts
        self._row[_TOKENS] += counts.sum() / self._chosen
        sent = next((t for t in tensors if t.dim() == 3 and t.shape[1] == experts), None)
        if sent is not None:
            self._row[_DROPPED] += counts.sum() - torch.count_nonzero(sent)


def _chosen_experts(modules: Iterable[nn.Module | None], experts: int) -> int:
    for module in modules:
        for name in _CHOICES:
            value = getattr(module, name, None)
            if isinstance(value, int) and 0 < value <= experts:
                return value
    return 1


def _tensors(value: Any, nesting: int = 3) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if nesting and isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each, nesting - 1)]
    return []


@cache
def operator_library() -> torch.library.Library | None:
    """Register `torch.ops.distmon.add_routing`; None where compiled graphs are left alone."""
    return register_effect("add_routing(Tensor[] values, Tensor sums) -> ()", _add_from_graph)


def _add_from_graph(values: list[torch.Tensor], sums: torch.Tensor) -> None:
    router: RouterHook | None = getattr(sums, "router", None)
    if router is not None and router.watching.counts_in_graph(sums.device):
        router.add(values)
