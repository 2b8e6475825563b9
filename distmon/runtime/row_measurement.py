"""The rows of one rank: what is read of its parameters around an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from csrc_triton.row_layout import SUM
from distmon.collect.losses import Number
from distmon.collect.ownership import LR_COLUMN, Ownership, found_inf
from distmon.collect.telemetry.device_clock import DeviceClock
from distmon.config import MonitorConfig
from distmon.device import to_device
from distmon.layout import Shard
from distmon.layout.replacements import ParameterIdentities, describe_added
from distmon.probe import Rows, choose_probe
from distmon.probe.partial_gradients import PartialGradients
from distmon.probe.sparse_gradients import fill_sparse_gradient
from distmon.probe.torch_probe import odd_multipliers
from distmon.record.sample_tables import Sampling
from distmon.reduce.buffers import Buffers
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from distmon.sampling.sample import REPLICA_CLASSES

log = logging.getLogger("distmon")
MOST_HISTOGRAMS = 1 << 15
"""Parameters up to which histograms of gradients are sent: 33 MB, or up to twice as much where a
parameter is on many ranks. Above it, no percentiles; the other statistics are 376 bytes for each
parameter."""
_48_BITS = (1 << 48) - 1


class RowMeasurement:
    """Keeps sampled weights before an optimizer step, and fills rows of statistics after it.

    Owns the shards, the plan of what is read of them, and the probe that reads; all of them follow
    parameters that are replaced. Used by the training thread only. Whose buffers the rows are in,
    and how they are sent, is not its concern: see `Observer`.
    """

    def __init__(
        self,
        shards: list[Shard],
        ownership: Ownership,
        config: MonitorConfig,
        reading: Reading,
        copies: int,
        rank: int,
    ) -> None:
        """`copies`: ranks that hold the same elements of a parameter, at most."""
        self.shards = shards
        self._ownership = ownership
        self._config = config
        self._reading = reading
        self._copies = copies
        self._rank = rank
        self.device = shards[0].weight().device
        self._row_multipliers = odd_multipliers(len(shards), self.device)
        self._plan_reading()
        self.sampling = Sampling.describe(
            self.plan,
            [len(s.global_shape) for s in shards],
            [s.requires_grad() for s in shards],
        )
        self._identities = ParameterIdentities(shards)
        self.device_clock = DeviceClock(self.device)
        self._everything = frozenset(range(len(shards)))
        self._filled: frozenset[int] = frozenset()
        """Rows that are filled in the coming observation."""
        self.has_snapshot = False
        """Whether the sampled weights were kept before a step of the coming observation."""
        self._all_applied = torch.ones(len(shards), dtype=torch.float64, device=self.device)
        self._owner_columns = ownership.columns()
        self._side: Rows | None = None
        self._unreadable: set[str] = set()

    def _plan_reading(self) -> None:
        self.plan = build_plan(self.shards, self._reading, self._config.seed, self.device)
        self._probe = choose_probe(self._config.backend, self.plan, self.shards, self.bin_words)
        if self._probe.has_own_slots:
            self.plan = self.plan.without_slots()
        self.partial = PartialGradients(self.plan, self.shards)
        classes = self.plan.replica_class.cpu().numpy()
        multipliers = self._row_multipliers.cpu().numpy()
        self._classes = [
            (i, rows, multipliers[rows])
            for i in sorted({*classes.tolist()})
            for rows in [np.flatnonzero(classes == i)]
        ]
        """The replica classes that there are, their rows, and the multipliers of these."""

    @property
    def bin_words(self) -> int:
        """Words of a row's histogram; 0 where none is sent."""
        if not self._config.percentiles or len(self.shards) > MOST_HISTOGRAMS:
            return 0
        return self.plan.bin_words(self._copies)

    @property
    def first_lr(self) -> Number:
        """Learning rate of this rank's first param group at the observed step; NaN without one."""
        return self._ownership.first_lr

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that train the observed parameters."""
        return self._ownership.optimizers

    @property
    def row_checksums(self) -> torch.Tensor:
        """A checksum of the sampled weights of each row, as measured last."""
        return self._probe.row_checksums

    def snapshot(self) -> None:
        """Keep the sampled weights. Call it just before an optimizer step."""
        self._follow_replacements()
        self.device_clock.run(self._probe.snapshot)
        self.has_snapshot = True

    def _follow_replacements(self) -> None:
        """Read what modules hold now, where parameters were replaced since attach.

        The samples stay the same, so the other ranks need not know.
        """
        replaced = self._identities.replaced(self.shards)
        if not replaced:
            return
        for each in replaced:
            self.shards[each.index] = each.shard
        level = logging.WARNING if self._rank == 0 else logging.INFO
        more = f" (and {len(replaced) - 1} others)" if len(replaced) > 1 else ""
        log.log(level, "distmon: parameter %s%s", replaced[0].sentence, more)
        self._ownership.refresh()
        self._plan_reading()

    def count_nonfinite(self) -> torch.Tensor:
        """Count NaN and Inf in all weights and gradients here; waits for the device once."""
        return self._probe.count_nonfinite()

    def measure(
        self,
        buffers: Buffers | None,
        optimizer: torch.optim.Optimizer | None,
        ran: bool,
        read_in_full: Sequence[int] = (),
    ) -> None:
        """Fill the rows that `optimizer` has just stepped, while their gradients still exist.

        Without an optimizer all rows that are not filled yet; without `ran` their gradients and
        updates count as not measured. The gradients of `read_in_full` are read in full. Without
        `buffers` nothing is read.
        """
        if buffers is None:
            return
        if not self._filled and self.partial.size:
            buffers.partial_gradients.zero_()
        mine = self._rows_to_fill(optimizer)
        if mine:
            self.device_clock.run(self._measure, buffers, mine, optimizer, ran, read_in_full)

    def begin_anew(self) -> None:
        """Let the next observation fill all rows again."""
        self._filled = frozenset()
        self.has_snapshot = False

    def put_owners(self, buffers: Buffers) -> None:
        """Write which param group each row belongs to, and its learning rate."""
        buffers.put_owners(self._owner_columns)
        for rows, rate in self._ownership.device_rates:
            index = to_device(torch.from_numpy(rows), self.device)
            buffers.rows.sums[index, LR_COLUMN] = rate.to(torch.float64)

    def checksums(self) -> torch.Tensor | list[int]:
        """Return 48 bits by replica class over all sampled weights of this rank, on its device."""
        if self.device.type == "cpu":
            on_host, by_class = self._probe.row_checksums.numpy(), [0] * REPLICA_CLASSES
            for i, rows, multipliers in self._classes:
                by_class[i] = int(on_host[rows].dot(multipliers)) & _48_BITS
            return by_class
        sums = torch.zeros(REPLICA_CLASSES, dtype=torch.int64, device=self.device)
        weighted = self._probe.row_checksums * self._row_multipliers
        return sums.index_add_(0, self.plan.replica_class, weighted) & _48_BITS

    def _measure(
        self,
        buffers: Buffers,
        mine: frozenset[int],
        optimizer: torch.optim.Optimizer | None,
        ran: bool,
        read_in_full: Sequence[int],
    ) -> None:
        applied = self._applied(mine if ran else frozenset())
        skipped = found_inf(optimizer)
        if skipped is not None:
            # First to its device: the other one may have no float64.
            applied = applied * (1 - skipped.to(applied.device).to(applied.dtype).reshape(()))
        in_full = [i for i in read_in_full if i in mine]
        if mine == self._everything:
            self._probe.measure(buffers.rows, applied)
            if in_full:
                self._probe.read_whole_gradients(buffers.rows, in_full)
        else:
            self._measure_some(buffers.rows, mine, applied, in_full)
        if not self._filled:
            # Before a scheduler changes the lr, and after the probe has read all parameters, which
            # are then in the cache.
            self._owner_columns = self._ownership.columns()
            if added := self._ownership.added():
                log.warning("distmon: %s", describe_added(added, self.shards))
        self.partial.move(buffers.rows, buffers.partial_gradients, applied, mine)
        for row in self._probe.without_grad:
            if row in mine:
                self._read_other_gradient(buffers.rows, row, applied[row])
        self._filled |= mine

    def _read_other_gradient(self, rows: Rows, row: int, applied: torch.Tensor) -> None:
        """Read a gradient that the probe cannot, or note that there is one."""
        shard = self.shards[row]
        gradient = shard.sparse_grad()
        if gradient is not None:
            sample = self.plan.gradient_samples[row]
            fill_sparse_gradient(rows, row, gradient, applied, sample)
        elif shard.grad_is_unreadable():
            rows.sums[row, SUM["g_unreadable"]] = 1.0
            self._name_unreadable(shard.name)

    def _name_unreadable(self, name: str) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            log.warning("distmon: the gradient of %s cannot be read; its norm is missing", name)

    def _rows_to_fill(self, optimizer: torch.optim.Optimizer | None) -> frozenset[int]:
        if len(self._filled) == len(self._everything):
            return frozenset()
        if optimizer is None:
            return self._everything - self._filled if self._filled else self._everything
        mine = self._ownership.rows_of(optimizer)
        if not self._filled and len(mine) < len(self._everything):
            mine = mine | self._ownership.unowned()
        return mine - self._filled if self._filled else mine

    def _applied(self, rows: frozenset[int]) -> torch.Tensor:
        """Return a column on the device: 1 for these rows, else 0."""
        if rows == self._everything:
            return self._all_applied
        applied = torch.zeros(len(self.shards), dtype=torch.float64)
        applied[sorted(rows)] = 1
        return to_device(applied, self.device)

    def _measure_some(
        self, rows: Rows, mine: frozenset[int], applied: torch.Tensor, in_full: list[int]
    ) -> None:
        """Fill the rows of one of several optimizers: a probe fills all rows, copy these only."""
        if self._side is None:
            self._side = Rows.like(rows)
        self._probe.measure(self._side, applied)
        self._probe.read_whole_gradients(self._side, in_full)
        rows.take_from(self._side, to_device(torch.tensor(sorted(mine)), applied.device))
