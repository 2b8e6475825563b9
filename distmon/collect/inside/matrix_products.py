"""Products of a matrix with vectors, by the shard that a rank holds, without gathering it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch

from distmon.device import to_device
from distmon.layout import Everything, Shard
from distmon.layout.shard import Box, FlatRange

_CHUNK: Final = 1 << 24
"""Elements that are converted to float32 at a time."""


@dataclass(frozen=True)
class _Tile:
    """A rectangle of the matrix in the flat local tensor."""

    begin: int
    rows: slice
    columns: slice | torch.Tensor

    def width(self, of: int) -> int:
        if isinstance(self.columns, torch.Tensor):
            return len(self.columns)
        return len(range(*self.columns.indices(of)))


class ShardProducts:
    """The part of one rank in the products of a matrix: what all ranks' parts add up to.

    A parameter of more than two dimensions is a matrix of its first one by all others.
    """

    def __init__(self, shard: Shard) -> None:
        self.shape = (shard.global_shape[0], prod(shard.global_shape[1:]))
        self._shard = shard
        self._tiles = [*_tiles(shard, self.shape)]

    @property
    def elements(self) -> int:
        """Elements that this rank holds."""
        columns = self.shape[1]
        return sum((t.rows.stop - t.rows.start) * t.width(columns) for t in self._tiles)

    def times(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of W v, float32 on the device of the weight."""
        found = torch.zeros(self.shape[0], device=vector.device)
        for tile, block in self._blocks():
            found[tile.rows] += block @ vector[tile.columns]
        return found

    def transposed_times(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of W' u."""
        found = torch.zeros(self.shape[1], device=vector.device)
        for tile, block in self._blocks():
            part = block.T @ vector[tile.rows]
            if isinstance(tile.columns, torch.Tensor):
                found.index_add_(0, tile.columns, part)
            else:
                found[tile.columns] += part
        return found

    def square(self) -> torch.Tensor:
        """Return this rank's part of the squared Frobenius norm."""
        weight = self._shard.weight()
        if not weight.numel():
            return torch.zeros((), device=weight.device)
        wide = torch.promote_types(weight.dtype, torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(weight.detach(), dtype=wide)
        return norm.square()

    def _blocks(self) -> Iterator[tuple[_Tile, torch.Tensor]]:
        """Yield pieces of the tiles in float32."""
        if not self._tiles:
            return
        flat = self._shard.weight().detach().reshape(-1)
        for tile in self._tiles:
            width = tile.width(self.shape[1])
            most = max(1, _CHUNK // width)
            for first in range(tile.rows.start, tile.rows.stop, most):
                last = min(first + most, tile.rows.stop)
                begin = tile.begin + (first - tile.rows.start) * width
                block = flat[begin : begin + (last - first) * width].view(last - first, width)
                yield _Tile(begin, slice(first, last), tile.columns), block.float()


def _tiles(shard: Shard, shape: tuple[int, int]) -> Iterator[_Tile]:
    region, (rows, columns) = shard.region, shape
    if isinstance(region, Everything):
        yield _Tile(0, slice(0, rows), slice(0, columns))
    elif isinstance(region, Box):
        kept = np.ix_(
            *(np.arange(o, o + s) for o, s in zip(region.offset[1:], region.size[1:], strict=True))
        )
        index = np.ravel_multi_index(kept, region.shape[1:]).ravel()
        first = region.offset[0]
        device = shard.weight().device
        yield _Tile(
            0, slice(first, first + region.size[0]), to_device(torch.from_numpy(index), device)
        )
    elif isinstance(region, FlatRange) and region.stop > region.start:
        yield from _flat_tiles(region.start, region.stop, columns)


def _flat_tiles(start: int, stop: int, columns: int) -> Iterator[_Tile]:
    """Yield the end of a row, whole rows, and the begin of a row."""
    row, within = divmod(start, columns)
    begin = 0
    if within:
        end = min(stop - start, columns - within)
        yield _Tile(0, slice(row, row + 1), slice(within, within + end))
        begin, row = end, row + 1
    whole = (stop - start - begin) // columns
    if whole > 0:
        yield _Tile(begin, slice(row, row + whole), slice(0, columns))
        begin, row = begin + whole * columns, row + whole
    rest = stop - start - begin
    if rest > 0:
        yield _Tile(begin, slice(row, row + 1), slice(0, rest))
