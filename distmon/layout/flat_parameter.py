"""FSDP1: parameters flattened into one FlatParameter per unit, of which each rank holds a range.

With `use_orig_params=True` the optimizer sees the original parameters as views of that range,
otherwise the FlatParameter itself; the shards are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from distmon.layout.shard import EMPTY_REGION, Everything, FlatRange, Region, Shard


class FlattenedParameter(NamedTuple):
    """One original parameter inside a FlatParameter."""

    module: nn.Module
    """The module that owned the parameter before it was flattened."""
    name: str
    """Its name in that module."""
    flat: Any
    """The FlatParameter."""
    number: int
    """Index among the parameters of the unit."""
    sharded: bool
    """Whether the unit's strategy shards the FlatParameter at all."""

    @property
    def original(self) -> nn.Parameter | None:
        """The parameter that the optimizer sees; None when it sees the FlatParameter."""
        originals = self.flat._params
        return None if originals is None else originals[self.number]


def flattened_parameters(modules: Iterable[nn.Module]) -> Iterator[FlattenedParameter]:
    """Yield every parameter that a FullyShardedDataParallel among these flattened, unit by unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in modules:
        handle = getattr(unit, "_handle", None)
        if not isinstance(unit, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        for number, info in enumerate(flat._param_infos):
            yield FlattenedParameter(
                info.module, info.param_name, flat, number, bool(handle.uses_sharded_strategy)
            )


def flat_shard(name: str, flattened: FlattenedParameter) -> Shard:
    """Return the shard of a flattened parameter."""
    flat, original = flattened.flat, flattened.original
    region, begin, length = _location(flattened)
    owner = flat if original is None else original
    return FlatShard(
        name=name,
        global_shape=tuple(flat._shapes[flattened.number]),
        dtype=flat.dtype,
        region=region,
        gate=owner,
        parameter=owner,
        sharding="flat" if flattened.sharded else "whole",
        flat=flat,
        original=original,
        is_sharded=flattened.sharded,
        begin=begin,
        length=length,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class FlatShard(Shard):
    """A range of a FlatParameter."""

    flat: Any
    original: nn.Parameter | None
    """See `FlattenedParameter.original`."""
    is_sharded: bool
    begin: int
    length: int
    base: torch.Tensor | None = None
    """The vector that `view` is of."""
    view: torch.Tensor | None = None
    """What `weight` returned last."""

    def weight(self) -> torch.Tensor:
        # `_local_shard` is this rank's range even while the unit is unsharded; it exists from the
        # first forward on.
        flat = self.flat
        local = getattr(flat, "_local_shard", flat.data) if self.is_sharded else flat.data
        if self.view is None or self.base is None or self.base.data_ptr() != local.data_ptr():
            self.base = local
            self.view = local[self.begin : self.begin + self.length]
        return self.view

    def grad(self) -> torch.Tensor | None:
        if self.original is not None:
            gradient = self.original.grad
            return None if gradient is None or not self.length else gradient.view(-1)
        if self.flat.grad is None or not self.length:
            return None
        return self.flat.grad[self.begin : self.begin + self.length]  # type: ignore[no-any-return]


def _location(flattened: FlattenedParameter) -> tuple[Region, int, int]:
    """Return the region of a parameter, and its offset and length in the rank's local vector."""
    flat, number = flattened.flat, flattened.number
    if flattened.sharded:
        info = flat._shard_param_infos[number]
        if not info.in_shard:
            return EMPTY_REGION, 0, 0
        first, last = info.intra_param_start_idx, info.intra_param_end_idx
        return FlatRange(first, last + 1), info.offset_in_shard, info.numel_in_shard
    begin, seen = 0, 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            if seen == number:
                return Everything(), begin, numel
            seen += 1
        begin += numel
    raise AssertionError("a flattened parameter is missing from its FlatParameter")
