"""The reference of what is inside a model: plain PyTorch in float64, over the global batch.

It shares with the monitor which units are sampled and where an activation is saturated; everything
else is computed from all positions, all logits and a singular value decomposition.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from distmon.collect.inside.activation_rows import UNBOUNDED, Bounds, bounds_of
from distmon.collect.inside.catalog import UNIT_SLOTS, spaced

Statistics = dict[str, float]
InsideTables = dict[str, dict[str, Statistics]]
"""Statistics by kind and by module, router or matrix."""

WINDOW: Final = 3
"""Observations without activity after which a unit or an expert is dead."""
_MASKED: Final = 1e4
"""A logit this far below the largest one of its query is a mask, of which some are finite."""


def activation_statistics(values: torch.Tensor, bounds: Bounds = UNBOUNDED) -> Statistics:
    """Return the statistics of [positions, units]."""
    low, high = bounds
    saturated = float(((values <= low) | (values >= high)).double().mean())
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "absmax": float(values.abs().max()),
        "rms": float(values.square().mean().sqrt()),
        "zero_fraction": float((values == 0).double().mean()),
        "saturated_fraction": math.nan if bounds == UNBOUNDED else saturated,
        "units": values.shape[1],
    }


def dead_fraction(observations: Sequence[torch.Tensor]) -> float:
    """Return the share of sampled units that are zero in all of [positions, units]."""
    alive = torch.stack([(values != 0).any(0) for values in observations]).any(0)
    return float((~alive[spaced(len(alive), UNIT_SLOTS)]).double().mean())


def attention_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    _value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return all logits of a call of `scaled_dot_product_attention`, masked ones as -inf."""
    del dropout_p
    query, key = query.detach().double(), key.detach().double()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(logits.shape[-2:]).triu(1).bool()
        logits = logits.masked_fill(hidden, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask.detach()
    return logits


def attention_statistics(calls: Sequence[torch.Tensor]) -> Statistics:
    """Return the statistics of the logits [..., queries, keys] of several calls."""
    largest, entropies, relative = -math.inf, [], []
    for logits in calls:
        top = logits.amax(-1)
        largest = max(largest, float(top.max()))
        visible = (logits > top[..., None] - _MASKED).sum(-1)
        weights = logits.softmax(-1)
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        several = visible > 1  # one key has no entropy
        entropies.append(entropy[several])
        relative.append(entropy[several] / visible[several].double().log())
    return {
        "logit_max": largest,
        "entropy": float(torch.cat(entropies).mean()),
        "relative_entropy": float(torch.cat(relative).mean()),
    }


def router_statistics(chosen: torch.Tensor, recent: Sequence[torch.Tensor]) -> Statistics:
    """Return the statistics of the experts [tokens, experts] that a router chose.

    `recent` are the same of the last observations, this one included.
    """
    loads = chosen.double().sum(0)
    share = loads / loads.sum()
    unused = torch.stack([each.any(0) for each in recent]).any(0).logical_not()
    entropy = -float(torch.special.xlogy(share, share).sum())
    return {
        "load_max": float(share.max()) * len(share),
        "diversity": math.exp(entropy) / len(share),
        "dead_fraction": float(unused.double().mean()),
        "dropped_fraction": 0.0,
        "experts_per_token": float(chosen.double().sum(1).mean()),
    }


def spectrum_statistics(matrix: torch.Tensor) -> Statistics:
    """Return the statistics of the singular values of a matrix."""
    singular = torch.linalg.svdvals(matrix.detach().double().flatten(1))
    return {
        "spectral_norm": float(singular[0]),
        "stable_rank": float(singular.square().sum() / singular[0] ** 2),
    }


class ExpectedInside:
    """Watches the unsharded model by plain hooks, and tabulates one observation after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        """Names of the modules that are being called, the innermost one last."""
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._logits: dict[str, list[torch.Tensor]] = {}
        self._recent_outputs: dict[str, deque[torch.Tensor]] = {}
        self._recent_choices: dict[str, deque[torch.Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect what the modules return, and the logits of their attention, in one step."""
        self._outputs, self._logits = {}, {}
        handles = [
            handle
            for name, module in self._model.named_modules()
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)),
                module.register_forward_hook(lambda _m, _a, output: self._keep(output)),
            )
        ]
        attention = functional.scaled_dot_product_attention

        def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = attention_logits(*args, **kwargs)
            self._logits.setdefault(self._running[-1], []).append(logits)
            return attention(*args, **kwargs)

        functional.scaled_dot_product_attention = seen  # also `nn.MultiheadAttention` calls it
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = attention
            for handle in handles:
                handle.remove()

    def _keep(self, output: object) -> None:
        name = self._running.pop()
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() > 1:
            self._outputs.setdefault(name, []).append(output.detach().double().flatten(0, -2))

    def tables(self) -> InsideTables:
        """Return the tables of the step that was watched last; call it once per observation."""
        found: InsideTables = {"activations": {}, "experts": {}}
        for name, outputs in self._outputs.items():
            module, values = self._model.get_submodule(name), torch.cat(outputs)
            row = activation_statistics(values, bounds_of(module))
            row["dead_fraction"] = dead_fraction(_recent(self._recent_outputs, name, values))
            found["activations"][name] = row
            chosen = self._chosen(name, values)
            if chosen is not None:
                recent = _recent(self._recent_choices, name, chosen)
                found["experts"][name] = router_statistics(chosen, recent)
        found["attention"] = {n: attention_statistics(calls) for n, calls in self._logits.items()}
        matrices = ((n, p) for n, p in self._model.named_parameters() if p.dim() > 1)
        found["spectra"] = {name: spectrum_statistics(matrix) for name, matrix in matrices}
        return found

    def _chosen(self, name: str, logits: torch.Tensor) -> torch.Tensor | None:
        """Return which experts a router that returns logits chose; None for another module."""
        holder, _, own = name.rpartition(".")
        top_k = getattr(self._model.get_submodule(holder), "top_k", None)
        if own not in ("router", "gate") or not isinstance(top_k, int):
            return None
        indices = logits.topk(top_k).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def _recent(
    kept: dict[str, deque[torch.Tensor]], name: str, newest: torch.Tensor
) -> Sequence[torch.Tensor]:
    window = kept.setdefault(name, deque(maxlen=WINDOW))
    window.append(newest)
    return [*window]
