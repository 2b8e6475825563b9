"""The two buffers that carry everything ranks exchange in an observation.

The SUM buffer (float64) holds the rows of all parameters, one slot per rank, the losses since the
last observation, partial gradients and the gradient norms of blocks. The MAX buffer (float32) holds
the maxima. Both have the same size on every rank whatever happens locally: an error travels as text
inside the rank's slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.device import DeviceMark, to_device
from distmon.probe import Rows
from distmon.reduce.process_group import Ranks
from distmon.reduce.rank_slots import CHECKSUMS, SLOT_SIZE, pack, unpack

Floats = NDArray[np.float64]
_NONFINITE = [SUM[f"{what}_{kind}"] for what in "wg" for kind in ("nan", "inf")]


@dataclass(frozen=True)
class Reduced:
    """The result of the two collectives on the host. Its arrays are its own, never buffer views."""

    sums: Floats
    maxima: Floats
    bins: NDArray[np.floating[Any]] | None
    """float32, which is exact up to 16 million elements in a bin."""
    ranks: Mapping[str, Floats]
    """Fields of the rank slots: `ranks[field][rank]`."""
    errors: Mapping[int, str]
    """Error text by rank that failed to observe."""
    losses: Floats
    """Mean over ranks by step since the last observation."""
    has_loss: NDArray[np.bool_]
    """Which of those steps had a loss on any rank."""
    partial_gradients: Floats
    """Sums of the partial gradients, for `PartialGradients.fill`."""
    blocks: Floats
    """Sums of the gradient norms of blocks, for `gain_table`."""

    @property
    def sample_has_nonfinite(self) -> bool:
        """Whether any sampled weight or gradient is NaN or Inf."""
        return bool(self.sums[:, _NONFINITE].any())

    def losses_by_step(self, steps: Sequence[int]) -> list[tuple[int, float]]:
        """Return the losses that were reported, with the numbers of their steps."""
        return [(steps[i], float(self.losses[i])) for i in np.flatnonzero(self.has_loss).tolist()]


class Buffers:
    """The two buffers of one monitor and the views of their parts, allocated once."""

    def __init__(
        self,
        parameters: int,
        ranks: Ranks,
        bins: bool,
        loss_slots: int,
        device: torch.device,
        partial_gradients: int = 0,
        blocks: int = 0,
    ) -> None:
        self._ranks = ranks
        columns = len(SUM_COLUMNS)
        sizes = (
            parameters * columns,
            parameters * BINS if bins else 0,
            ranks.size * SLOT_SIZE,
            2 * loss_slots,
            partial_gradients,
            blocks,
        )
        self._sum = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._max = torch.zeros(parameters * len(MAX_COLUMNS), dtype=torch.float32, device=device)
        parts = torch.split(self._sum, [*sizes])
        rows, histogram, slots, losses, self.partial_gradients, self.blocks = parts
        self.rows = Rows(
            sums=rows.view(parameters, columns),
            maxima=self._max.view(parameters, len(MAX_COLUMNS)),
            bins=histogram.view(parameters, BINS) if bins else None,
        )
        self._slots = slots.view(ranks.size, SLOT_SIZE)
        self._losses = losses.view(2, loss_slots)
        self._host_sum, self._host_max = self._allocate_host()
        host = [part.numpy() for part in torch.split(self._host_sum, [*sizes])]
        self._host_sums = host[0].reshape(parameters, columns)
        self._host_bins = host[1].reshape(parameters, BINS) if bins else None
        self._host_slots = host[2].reshape(ranks.size, SLOT_SIZE)
        self._host_losses = host[3].reshape(2, loss_slots)
        self._host_partial_gradients, self._host_blocks = host[4:]
        self._host_maxima = self._host_max.numpy().reshape(parameters, -1)
        self._own_slot = torch.zeros(SLOT_SIZE, dtype=torch.float64)
        self._copied: DeviceMark | None = None

    def _allocate_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the reduced numbers of both buffers are read."""
        pinned = self._sum.is_cuda
        return (
            torch.empty_like(self._sum, device="cpu", pin_memory=pinned),
            torch.empty_like(self._max, device="cpu", pin_memory=pinned),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sends into the collectives of one observation."""
        return sum(t.numel() * t.element_size() for t in (self._sum, self._max))

    def put_owners(self, columns: Floats) -> None:
        """Write the ownership columns: the first of the summed columns."""
        owners = to_device(torch.from_numpy(columns), self._sum.device)
        self.rows.sums[:, : columns.shape[1]] = owners

    def put_slot(
        self, values: Mapping[str, float], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        """Fill this rank's slot and clear the others; `checksums` are int64 by replica class."""
        self._own_slot.numpy()[:] = pack(values, error)
        self._slots.zero_()
        mine = self._slots[self._ranks.rank]
        mine.copy_(to_device(self._own_slot, mine.device))
        if len(checksums):
            mine[CHECKSUMS] = torch.as_tensor(checksums)

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        """Write the losses by step since the last observation, and 1 where this rank has one."""
        there = to_device(torch.from_numpy(given), self._sum.device)
        self._losses.zero_()
        self._losses[0, : len(given)] = torch.where(there > 0, torch.as_tensor(values), 0.0)
        self._losses[1, : len(given)] = there

    def copy_rows_from(self, other: Buffers) -> None:
        """Take over what was measured into `other` and not sent yet."""
        mine, theirs = self.rows, other.rows
        mine.sums.copy_(theirs.sums)
        mine.maxima.copy_(theirs.maxima)
        if mine.bins is not None and theirs.bins is not None:
            mine.bins.copy_(theirs.bins)
        self.partial_gradients.copy_(other.partial_gradients)

    def clear(self) -> None:
        """Make this rank's contribution neutral to both reductions."""
        self._sum.zero_()
        self._max.fill_(-torch.inf)

    def start(self) -> None:
        """Enter the two collectives and queue the copy to the host. Does not wait on CUDA."""
        self._ranks.all_reduce_together(
            (self._sum, dist.ReduceOp.SUM), (self._max, dist.ReduceOp.MAX)
        )
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        self._host_sum.copy_(self._sum, non_blocking=True)
        self._host_max.copy_(self._max, non_blocking=True)
        self._copied = DeviceMark() if self._sum.is_cuda else None

    def finish(self, steps: int) -> Reduced:
        """Return a copy of the reduced numbers; `steps` is how many losses were sent.

        Called some steps after `start` on CUDA, when the copy to the host is long done.
        """
        if self._copied is not None:
            self._copied.wait()
        loss_sum, loss_count = self._host_losses[:, :steps]
        fields, errors = unpack(self._host_slots)
        has_loss = loss_count > 0
        return Reduced(
            sums=self._host_sums.copy(),
            maxima=self._host_maxima.astype(np.float64),
            bins=None if self._host_bins is None else self._host_bins.astype(np.float32),
            ranks=fields,
            errors=errors,
            losses=np.divide(loss_sum, loss_count, where=has_loss, out=np.full(steps, np.nan)),
            has_loss=has_loss,
            partial_gradients=self._host_partial_gradients.copy(),
            blocks=self._host_blocks.copy(),
        )


class HostBuffers(Buffers):
    """Buffers of a model on the CPU: the reduced numbers are read where they were sent from.

    Filled with numpy: after a training step all code is cold, and dispatching a torch operator
    takes longer than its work here.
    """

    def _allocate_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sum, self._max

    def put_owners(self, columns: Floats) -> None:
        self._host_sums[:, : columns.shape[1]] = columns

    def put_slot(
        self, values: Mapping[str, float], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        self._host_slots.fill(0)
        mine = self._host_slots[self._ranks.rank]
        mine[:] = pack(values, error)
        if len(checksums):
            mine[CHECKSUMS] = checksums

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        self._host_losses.fill(0)
        self._host_losses[0, : len(given)] = np.where(given > 0, values, 0.0)
        self._host_losses[1, : len(given)] = given

    def _copy_to_host(self) -> None:
        pass


def buffers_on(device: torch.device) -> type[Buffers]:
    """Return the kind of buffers for tensors on `device`."""
    return HostBuffers if device.type == "cpu" else Buffers
