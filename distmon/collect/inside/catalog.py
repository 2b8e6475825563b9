"""What is watched inside the model, and where its numbers are in the buffers. Plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

ACTIVATION_SUMS: Final = (
    *("count", "total", "squares", "zeros", "saturated", "positions"),
    *("samples", "trace", "trace_square", "square_trace", "sampled_square"),
)
"""Columns of an activation that are added over ranks. From `samples` on they are those of the
sampled Gram matrix: how many there were, and sums of what they estimate."""
ACTIVATION_MAXIMA: Final = ("absmax", "units", "bounded")
"""Columns of an activation that are maxima, before the unit slots."""
UNIT_SLOTS: Final = 256
"""Units of an activation that are looked at, evenly spaced: all of a narrower one."""
ATTENTION_SUMS: Final = ("rows", "entropy", "relative_entropy")
ATTENTION_MAXIMA: Final = ("logit",)
EXPERT_SUMS: Final = ("tokens", "dropped")
"""Columns of a router, before the tokens of each expert."""
SPECTRUM_SUMS: Final = ("values", "norm", "error", "stable_rank")
"""Columns of a matrix; `values` counts the ranks that know them."""

KINDS: Final = ("activations", "attention", "experts", "spectra")


@dataclass(frozen=True)
class Segment:
    """Where one kind of statistics begins in both buffers, and how long one of its rows is."""

    sums: int
    maxima: int
    sum_columns: int
    max_columns: int


@dataclass(frozen=True)
class Catalog:
    """What is watched in the whole model; the same on every rank."""

    activations: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    experts: tuple[tuple[str, int], ...] = ()
    """Routers with the number of experts that they choose from."""
    matrices: tuple[str, ...] = ()
    """Parameters whose spectral norm is estimated."""

    def __bool__(self) -> bool:
        return bool(self.activations or self.attention or self.experts or self.matrices)

    @property
    def rows_of_activations(self) -> Segment:
        """The first segment."""
        return Segment(0, 0, len(ACTIVATION_SUMS), len(ACTIVATION_MAXIMA) + UNIT_SLOTS)

    @property
    def rows_of_attention(self) -> Segment:
        """The second segment."""
        before = self.rows_of_activations
        count = len(self.activations)
        return Segment(
            count * before.sum_columns,
            count * before.max_columns,
            len(ATTENTION_SUMS),
            len(ATTENTION_MAXIMA),
        )

    def rows_of_experts(self) -> Iterator[tuple[str, int, int]]:
        """Yield router, number of experts, and where its sums begin."""
        before = self.rows_of_attention
        begin = before.sums + len(self.attention) * before.sum_columns
        for name, experts in self.experts:
            yield name, experts, begin
            begin += len(EXPERT_SUMS) + experts

    @property
    def rows_of_matrices(self) -> Segment:
        """The last segment."""
        before = self.rows_of_attention
        begin = before.sums + len(self.attention) * before.sum_columns
        begin += sum(len(EXPERT_SUMS) + experts for _, experts in self.experts)
        return Segment(begin, self.maxima, len(SPECTRUM_SUMS), 0)

    @property
    def sums(self) -> int:
        """Numbers in the SUM buffer."""
        last = len(self.matrices) * len(SPECTRUM_SUMS)
        return self.rows_of_matrices.sums + last

    @property
    def maxima(self) -> int:
        """Numbers in the MAX buffer."""
        last = self.rows_of_attention
        return last.maxima + len(self.attention) * last.max_columns


def spaced(total: int, most: int) -> Sequence[int]:
    """Return at most `most` of `total` indices, evenly spaced, the first one included."""
    count = min(total, most)
    return [index * total // count for index in range(count)]
