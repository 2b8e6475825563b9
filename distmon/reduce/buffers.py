"""The two buffers that carry everything ranks exchange in an observation.

The SUM buffer (float64) holds the rows of all parameters, one slot per rank, the losses since the
last observation, partial gradients, the gradient norms of blocks and what is watched inside the
model. The MAX buffer (float32) holds
the maxima. Both have the same size on every rank whatever happens locally: an error travels as text
inside the rank's slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from csrc_triton.row_layout import MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.losses import Number, host_value, split_by_place
from distmon.device import to_device
from distmon.probe import Rows
from distmon.reduce.channel import Reduction
from distmon.reduce.rank_slots import CHECKSUMS, FAILURE, INDEX, SLOT_SIZE, pack
from distmon.reduce.reduced import Floats
from distmon.reduce.reduced_view import BufferSizes, ReducedView

_MOST_BYTES: Final = 64 << 20
"""Memory for observations in flight, unless two need more."""
_MOST_IN_FLIGHT: Final = 8


class Buffers:
    """One SUM and one MAX buffer on the device of the weights, and the views of their parts."""

    def __init__(
        self, sizes: BufferSizes, rank: int, device: torch.device, pinned: bool = False
    ) -> None:
        self.sizes = sizes
        self._rank = rank
        parts = sizes.parts
        self.sum = torch.zeros(sum(parts), dtype=torch.float64, device=device, pin_memory=pinned)
        self.max = torch.zeros(sizes.maxima, dtype=torch.float32, device=device, pin_memory=pinned)
        rows, histogram, slots, losses, *others = torch.split(self.sum, parts)
        self.partial_gradients, self.blocks, self.inside = others
        row_maxima = self.max[: sizes.maxima - sizes.inside_maxima]
        self.inside_maxima = self.max[len(row_maxima) :]
        self.rows = Rows(
            sums=rows.view(sizes.parameters, len(SUM_COLUMNS)),
            maxima=row_maxima.view(sizes.parameters, len(MAX_COLUMNS)),
            bins=histogram.view(sizes.parameters, sizes.bins) if sizes.bins else None,
        )
        self._slots = slots.view(sizes.ranks, SLOT_SIZE)
        self._losses = losses.view(2, sizes.losses)
        self._own_slot = torch.zeros(SLOT_SIZE, dtype=torch.float64)

    @property
    def reductions(self) -> tuple[Reduction, Reduction]:
        """The two collectives of an observation."""
        return (self.sum, dist.ReduceOp.SUM), (self.max, dist.ReduceOp.MAX)

    def put_owners(self, columns: Floats) -> None:
        """Write the ownership columns: the first of the summed columns."""
        owners = to_device(torch.from_numpy(columns), self.sum.device)
        self.rows.sums[:, : columns.shape[1]] = owners

    def put_slot(
        self, values: Mapping[str, Number], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        """Fill this rank's slot and clear the others; `checksums` are int64 by replica class.

        A value may be a number on a device: it is copied there, without a wait.
        """
        here, elsewhere = split_by_place(values)
        self._own_slot.numpy()[:] = pack(here, host_value, error)
        self._slots.zero_()
        mine = self._slots[self._rank]
        mine.copy_(to_device(self._own_slot, mine.device))
        for name, value in elsewhere.items():
            mine[INDEX[name]].copy_(value.detach().reshape(()), non_blocking=True)
        if len(checksums):
            mine[CHECKSUMS] = torch.as_tensor(checksums)

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        """Write the losses by step since the last observation, and 1 where this rank has one."""
        there = to_device(torch.from_numpy(given), self.sum.device)
        self._losses.zero_()
        self._losses[0, : len(given)] = torch.where(there > 0, torch.as_tensor(values), 0.0)
        self._losses[1, : len(given)] = there

    def clear(self) -> None:
        """Make this rank's contribution neutral to both reductions."""
        self.sum.zero_()
        self.max.fill_(-torch.inf)

    def put_failure(self, step: int, plan_hash: int) -> None:
        """Contribute nothing but the word that this rank failed. The last resort: no allocation."""
        self.clear()
        mine = self._slots[self._rank]
        for field, value in zip(FAILURE, (1, step, plan_hash), strict=True):
            mine[field] = value


class HostBuffers(Buffers):
    """Buffers on the host: pinned, for what comes from an accelerator; or filled here, on a CPU.

    Filled with numpy: after a training step all code is cold, and dispatching a torch operator
    takes longer than its work here.
    """

    def __init__(self, sizes: BufferSizes, rank: int, pinned: bool = False) -> None:
        super().__init__(sizes, rank, torch.device("cpu"), pinned)
        self.view = ReducedView(sizes, self.sum.numpy(), self.max.numpy())

    def put_owners(self, columns: Floats) -> None:
        self.view.sums[:, : columns.shape[1]] = columns

    def put_slot(
        self, values: Mapping[str, Number], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        slots = self.view.slots
        slots.fill(0)
        mine = slots[self._rank]
        # Weights are on the host; a number on a device is waited for.
        mine[:] = pack(values, host_value, error)
        if len(checksums):
            mine[CHECKSUMS] = checksums

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        losses = self.view.losses
        losses[0, : len(given)] = values  # 0 where none was given
        losses[1, : len(given)] = given
        losses[:, len(given) :] = 0

    @property
    def sample_has_nonfinite(self) -> bool:
        """Whether any sampled weight or gradient is NaN or Inf."""
        return self.view.sample_has_nonfinite


class HostPool:
    """Host buffers for observations in flight, allocated when needed and used again."""

    def __init__(self, sizes: BufferSizes, rank: int, pinned: bool) -> None:
        self.sizes = sizes
        self._rank = rank
        self._pinned = pinned
        self._free: list[HostBuffers] = []
        # Weak: buffers that were lost in a fault on their way are replaced, and never missed.
        self._alive: WeakSet[HostBuffers] = WeakSet()
        self._most = max(2, min(_MOST_IN_FLIGHT, _MOST_BYTES // max(1, sizes.nbytes)))

    def take(self) -> HostBuffers | None:
        """Return unused buffers; None when too many are in flight."""
        if self._free:
            return self._free.pop()
        return self.allocate() if len(self._alive) < self._most else None

    def allocate(self) -> HostBuffers:
        """Return new buffers, whatever is in flight."""
        buffers = HostBuffers(self.sizes, self._rank, self._pinned)
        self._alive.add(buffers)
        return buffers

    def give(self, buffers: HostBuffers) -> None:
        """Take buffers back. Those of another size are dropped."""
        if buffers.sizes == self.sizes and len(self._free) < self._most:
            self._free.append(buffers)

    def resized(self, sizes: BufferSizes) -> Self:
        """Return a pool of other sizes; buffers in flight are dropped when they come back."""
        return type(self)(sizes, self._rank, self._pinned)
