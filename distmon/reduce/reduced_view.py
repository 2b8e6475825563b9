"""The parts of the two buffers of an observation, as plain arrays; needs no torch.

The training process fills buffers through it, and the writer process reads what it was sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.probe.percentiles import unpack_bins
from distmon.reduce.rank_slots import SLOT_SIZE, unpack
from distmon.reduce.reduced import Floats, Reduced, sample_has_nonfinite

_U_COUNT: Final = SUM["u_count"]


class BufferSizes(NamedTuple):
    """What the buffers have room for; the same on every rank."""

    parameters: int
    ranks: int = 1
    bins: int = BINS
    """Words that the bins of a parameter are packed into; 0: without percentiles."""
    losses: int = 1
    partial_gradients: int = 0
    blocks: int = 0
    inside: int = 0
    inside_maxima: int = 0

    @property
    def parts(self) -> list[int]:
        """Numbers in each part of the SUM buffer."""
        return [
            self.parameters * len(SUM_COLUMNS),
            self.parameters * self.bins,
            self.ranks * SLOT_SIZE,
            2 * self.losses,
            self.partial_gradients,
            self.blocks,
            self.inside,
        ]

    @property
    def maxima(self) -> int:
        """Numbers in the MAX buffer."""
        return self.parameters * len(MAX_COLUMNS) + self.inside_maxima

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sends in one observation."""
        return 8 * sum(self.parts) + 4 * self.maxima


class ReducedView:
    """Reads two buffers on the host, without copying them unless it says so."""

    def __init__(self, sizes: BufferSizes, added: Floats, highest: NDArray[np.float32]) -> None:
        """`added`: the SUM buffer; `highest`: the MAX buffer."""
        self.sizes = sizes
        self.added, self.highest = added, highest
        self.raw = [pickle.PickleBuffer(each.data.cast("B")) for each in (added, highest)]
        """The bytes of both, for a message: made once, which takes longer than to copy them."""
        ends = np.cumsum(sizes.parts).tolist()
        rows, bins, slots, losses, partial, blocks, inside = (
            added[begin:end] for begin, end in zip([0, *ends], ends, strict=False)
        )
        self.sums: Floats = rows.reshape(sizes.parameters, len(SUM_COLUMNS))
        self.bins: Floats | None = None
        if sizes.bins:
            self.bins = bins.reshape(sizes.parameters, sizes.bins)
        self.slots: Floats = slots.reshape(sizes.ranks, SLOT_SIZE)
        self.losses: Floats = losses.reshape(2, sizes.losses)
        self.partial_gradients, self.blocks, self.inside = partial, blocks, inside
        of_rows = sizes.maxima - sizes.inside_maxima
        self.maxima = highest[:of_rows].reshape(sizes.parameters, len(MAX_COLUMNS))
        self.inside_maxima = highest[of_rows:]

    @property
    def sample_has_nonfinite(self) -> bool:
        """Whether any sampled weight or gradient is NaN or Inf."""
        return sample_has_nonfinite(self.sums)

    @property
    def applied(self) -> bool:
        """Whether an optimizer stepped any parameter on any rank."""
        return bool(np.count_nonzero(self.sums[:, _U_COUNT]))

    def read_losses(self, steps: Sequence[int]) -> dict[int, float]:
        """Return the mean over ranks by step, of the steps that have a loss on any rank."""
        total, count = self.losses[:, : len(steps)].tolist()
        rows = zip(steps, total, count, strict=True)
        return {step: added / ranks for step, added, ranks in rows if ranks > 0}

    def read_slots(self) -> tuple[Mapping[str, Floats], dict[int, str]]:
        """Return copies of the fields of all slots, and the error texts by rank."""
        return unpack(self.slots)

    def read(self) -> Reduced:
        """Return a copy of the reduced numbers."""
        fields, errors = self.read_slots()
        return Reduced(
            sums=self.sums.copy(),
            maxima=self.maxima.astype(np.float64),
            bins=None if self.bins is None else unpack_bins(self.bins),
            ranks=fields,
            errors=errors,
            partial_gradients=self.partial_gradients.copy(),
        )
