"""What an observation may cost: the collectives and the bytes that every rank sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from csrc_triton.row_layout import MAX_COLUMNS, SUM_COLUMNS, bin_words
from distmon.reduce.rank_slots import SLOT_SIZE
from distmon.verify.expected import Expected
from distmon.verify.observe import Observed

COLLECTIVES: Final = 2


def bytes_of_observation(truth: Expected, ranks: Sequence[Observed], interval: int) -> int:
    """Return the bytes that one rank must send: parameter rows, rank telemetry and losses.

    For partial gradients it also sends the sampled elements and one scale factor, and the rows of
    the activations that are watched.
    """
    row = 8 * len(SUM_COLUMNS) + 8 * _bin_words(truth, ranks) + 4 * len(MAX_COLUMNS)
    partial = frozenset[str]().union(*(rank.partial for rank in ranks))
    samples: dict[str, int] = dict(zip(truth.names, truth.gradient_sampled.tolist(), strict=True))
    elements = sum(samples[name] + 1 for name in partial)
    total = len(truth.names) * row + len(ranks) * 8 * SLOT_SIZE + 2 * 8 * interval + 8 * elements
    return total + ranks[0].watched_bytes


def _bin_words(truth: Expected, ranks: Sequence[Observed]) -> int:
    """Return the words that hold the bins of a row when every rank counts what it holds."""
    read = [sum(rank.sampled.get(name, 0) for rank in ranks) for name in truth.names]
    copies = np.ceil((np.array(read) / np.maximum(truth.sampled, 1)).max(initial=1))
    counted = max(truth.sampled.max(initial=0), truth.histogram.sum(1).max(initial=0))
    return bin_words(2 * int(copies) * int(counted))


def cost_problems(ranks: Sequence[Observed], nbytes: int) -> Iterator[str]:
    """Yield where a rank sends more or less than that."""
    single = len(ranks) == 1
    collectives = 0 if single else COLLECTIVES
    for i, rank in enumerate(ranks):
        for n in rank.collectives:
            if n != collectives:
                yield f"rank {i} enters {n} collectives in an observation, not {collectives}"
        for n, record in zip(rank.nbytes, rank.records, strict=True):
            reported = record.metrics["performance/monitor_bytes"]
            if reported != nbytes or (not single and n != reported):
                yield (
                    f"rank {i} sends {n} bytes and reports {reported:.0f}, but {nbytes} are needed"
                )
