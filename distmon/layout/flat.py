"""FSDP1: parameters flattened into one vector per wrapped unit, of which each rank holds a range.

With `use_orig_params=True` the optimizer sees slices of that vector under the original parameters,
otherwise the vector itself; the pieces are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from distmon.layout.shard import NOWHERE, Everything, FlatRange, Region, Shard


class FlatPiece(NamedTuple):
    """One original parameter inside a flattened unit."""

    module: nn.Module
    """The module that owned the parameter before it was flattened."""
    name: str
    """Its name in that module."""
    flat: Any
    """The FlatParameter."""
    number: int
    """Which of the unit's parameters it is."""
    sharded: bool
    """Whether the unit's strategy splits the vector at all."""

    @property
    def original(self) -> nn.Parameter | None:
        """The parameter that the optimizer sees; None when that is the vector."""
        originals = self.flat._params
        return None if originals is None else originals[self.number]


def flat_pieces(model: nn.Module) -> Iterator[FlatPiece]:
    """Every parameter that a FullyShardedDataParallel in `model` has flattened, unit by unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in model.modules():
        handle = getattr(unit, "_handle", None)
        if not isinstance(unit, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        for number, info in enumerate(flat._param_infos):
            yield FlatPiece(
                info.module, info.param_name, flat, number, bool(handle.uses_sharded_strategy)
            )


def flat_shard(name: str, piece: FlatPiece) -> Shard:
    """The shard of a flattened parameter."""
    flat, original = piece.flat, piece.original
    shape = tuple(flat._shapes[piece.number])
    region, begin, length = _place(piece)
    owner = flat if original is None else original
    cut_from: torch.Tensor | None = None
    view: torch.Tensor

    def weight() -> torch.Tensor:
        nonlocal cut_from, view
        # The rank's own range, also while the unit is gathered; set at the first forward.
        local = getattr(flat, "_local_shard", flat.data) if piece.sharded else flat.data
        if cut_from is None or cut_from.data_ptr() != local.data_ptr():
            cut_from, view = local, local[begin : begin + length]
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
        spread="flat" if piece.sharded else "whole",
    )


def _place(piece: FlatPiece) -> tuple[Region, int, int]:
    """Region of a piece, and where it begins and how long it is in the rank's vector."""
    flat, number = piece.flat, piece.number
    if piece.sharded:
        info = flat._shard_param_infos[number]
        if not info.in_shard:
            return NOWHERE, 0, 0
        first, last = info.intra_param_start_idx, info.intra_param_end_idx
        return FlatRange(first, last + 1), info.offset_in_shard, info.numel_in_shard
    begin, seen = 0, 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            if seen == number:
                return Everything(), begin, numel
            seen += 1
        begin += numel
    raise AssertionError("a flattened parameter is missing from its own vector")
