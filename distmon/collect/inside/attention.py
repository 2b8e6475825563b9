"""Largest logit and entropy of attention, from a sample of queries of a few heads."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from distmon.collect.inside.catalog import spaced

MostRead = tuple[int, int, int]
"""Examples, heads and queries of one call whose logits are computed, at most."""
_FAR: Final = 1e4
"""A logit this far below the largest one of its query is a mask."""


class AttentionRow:
    """The row of one module with attention."""

    def __init__(
        self, sums: torch.Tensor, maxima: torch.Tensor, most: MostRead, any_shape: bool = False
    ) -> None:
        """`any_shape`: a softmax over three dimensions is attention though they are not square."""
        self.sums, self._maxima = sums, maxima
        self._most = most
        self._any_shape = any_shape

    def add_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Add a call of `scaled_dot_product_attention`; the logits of the sample are computed."""
        del value, dropout_p, enable_gqa
        queries, keys = _plain(query), _plain(key)
        if queries is None or keys is None or queries.dim() < 3:
            return
        query, key = queries, keys
        if query.dim() == 3:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        heads, length = query.shape[-3], query.shape[-2]
        queries = query.reshape(-1, heads, length, query.shape[-1])
        keys = key.reshape(-1, *key.shape[-3:])
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        group = heads // keys.shape[1]
        sizes = zip(queries.shape, self._most, strict=False)
        examples, chosen, at = (spaced(size, most) for size, most in sizes)
        logits = torch.stack(
            [
                _some(queries[b, h], at).float() @ keys[b, h // group].float().T * scale
                for b in examples
                for h in chosen
            ]
        ).reshape(len(examples), len(chosen), len(at), keys.shape[-2])
        if is_causal:
            # The indices of `at`, made on the device: a copy would wait for it.
            last = torch.arange(len(at), device=logits.device)[:, None] * length // len(at)
            hidden = torch.arange(keys.shape[-2], device=logits.device) > last
            logits = logits.masked_fill(hidden, -math.inf)
        mask = None if attn_mask is None else _plain(attn_mask)
        if mask is not None:
            shape = (*queries.shape[:3], keys.shape[-2])
            mask = self._sample(mask.expand(*query.shape[:-3], *shape[1:]).reshape(shape))
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, -math.inf)
            else:
                logits = logits + mask
        self._add(logits)

    def add_logits(self, logits: torch.Tensor, result: Any) -> None:
        """Add the logits that a module passed to `softmax` over keys."""
        found = _plain(logits)
        if found is None or found.dim() < 3 or not isinstance(result, torch.Tensor):
            return
        if found.dim() == 3 and found.shape[-1] != found.shape[-2] and not self._any_shape:
            return  # such as the probabilities of a vocabulary
        if found.dim() == 3:
            found = found.unsqueeze(1)
        found = found.reshape(-1, *found.shape[-3:])
        self._add(self._sample(found).float())

    def _sample(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sampled examples, heads and queries of [examples, heads, queries, keys]."""
        for dim, most in enumerate(self._most):
            chosen = spaced(values.shape[dim], most)
            if len(chosen) < values.shape[dim]:
                values = torch.stack([values.select(dim, i) for i in chosen], dim)
        return values

    def _add(self, logits: torch.Tensor) -> None:
        """Add the sampled logits, one row for each query."""
        logits = logits.reshape(-1, logits.shape[-1]).double()
        top = logits.amax(-1, keepdim=True)
        finite = torch.isfinite(top).squeeze(-1)  # a query may see no key at all
        shifted = torch.where(finite[:, None], logits - top, 0.0)
        weights = shifted.exp()
        total = weights.sum(-1)
        entropy = total.log() - (weights * shifted.clamp_min(-_FAR)).sum(-1) / total
        visible = (shifted > -_FAR).sum(-1)
        several = finite & (visible > 1)
        relative = entropy / visible.double().clamp_min(2).log()
        self.sums[0] += several.sum()
        self.sums[1] += torch.where(several, entropy, 0.0).sum()
        self.sums[2] += torch.where(several, relative, 0.0).sum()
        largest = torch.where(finite, top.squeeze(-1), -math.inf).amax()
        self._maxima.clamp_(min=largest.to(self._maxima.dtype))


def _plain(tensor: Any) -> torch.Tensor | None:
    """Return the local tensor; None for what cannot be read by index."""
    from distmon.layout import local_part

    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        return None
    part = local_part(tensor.detach())
    return None if part is None else part[0]


def _some(rows: torch.Tensor, at: Any) -> torch.Tensor:
    return torch.stack([rows[i] for i in at])
