"""FSDP1: parameters flattened into one FlatParameter per unit, of which each rank holds a range.

With `use_orig_params=True` the optimizer sees the original parameters as views of that range,
otherwise the FlatParameter itself; the shards are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    shape = tuple(flat._shapes[flattened.number])
    region, begin, length = _location(flattened)
    owner = flat if original is None else original
    base: torch.Tensor | None = None
    view: torch.Tensor

    def weight() -> torch.Tensor:
        nonlocal base, view
        # `_local_shard` is this rank's range even while the unit is unsharded; it exists from the
        # first forward on.
        local = getattr(flat, "_local_shard", flat.data) if flattened.sharded else flat.data
        if base is None or base.data_ptr() != local.data_ptr():
            base, view = local, local[begin : begin + length]
        return view

    def grad() -> torch.Tensor | None:
        if original is not None:
            gradient = original.grad
            return None if gradient is None or not length else gradient.view(-1)
        if flat.grad is None or not length:
            return None
        return flat.grad[begin : begin + length]  # type: ignore[no-any-return]

    return Shard(
        name=name,
        global_shape=shape,
        dtype=flat.dtype,
        region=region,
        weight=weight,
        grad=grad,
        gate=owner,
        grad_is_unreadable=lambda: False,
        parameters=(owner,),
        sharding="flat" if flattened.sharded else "whole",
    )


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
