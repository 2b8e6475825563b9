"""The part of an observation that touches tensors and ranks: snapshot, measure, reduce."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from csrc_triton.row_layout import SUM
from distmon.collect.finite_watch import Evidence
from distmon.collect.gradient_gain import BackwardNorms
from distmon.collect.inside.inside import Inside
from distmon.collect.losses import Floats, LossRing, Number
from distmon.collect.ownership import LR_COLUMN, Ownership, found_inf
from distmon.collect.task_gradients import TaskGradients
from distmon.collect.telemetry.device_clock import DeviceClock
from distmon.config import MonitorConfig
from distmon.device import to_device
from distmon.layout import Shard
from distmon.layout.replacements import ParameterIdentities, describe_added
from distmon.probe import Rows, choose_probe
from distmon.probe.partial_gradients import PartialGradients
from distmon.probe.sparse_gradients import fill_sparse_gradient
from distmon.probe.torch_probe import odd_multipliers
from distmon.record.statistics import Sampling
from distmon.reduce.buffers import Buffers, HostBuffers, HostPool
from distmon.reduce.outbox import DeviceOutbox, HostOutbox, Shipment
from distmon.reduce.process_group import Ranks
from distmon.reduce.reduced_view import BufferSizes
from distmon.runtime.agreement import agreement_hashes
from distmon.runtime.arrived import Arrived, InFlight
from distmon.runtime.searches import LocalEvidence, Searches
from distmon.runtime.spectra_sweeps import SpectraSweeps
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from distmon.sampling.sample import REPLICA_CLASSES

log = logging.getLogger("distmon")
MOST_LOSSES = 4096
"""Most steps whose losses one observation sends; of a longer interval the last ones."""
MOST_HISTOGRAMS = 1 << 15
"""Parameters up to which histograms of gradients are sent: 33 MB, or up to twice as much where a
parameter is on many ranks. Above it, no percentiles; the other statistics are 376 bytes for each
parameter."""
_48_BITS = (1 << 48) - 1


class Observer:
    """Owns the tables and buffers of one rank, which are allocated once."""

    def __init__(
        self,
        shards: list[Shard],
        ownership: Ownership,
        ranks: Ranks,
        config: MonitorConfig,
        reading: Reading,
        gain: BackwardNorms,
        inside: Inside,
        copies: int,
    ) -> None:
        self._shards = shards
        self._copies = copies
        self._ownership = ownership
        self.ranks = ranks
        self.config = config
        device = shards[0].weight().device
        self._reading = reading
        self.plan = build_plan(shards, reading, config.seed, device)
        self.sampling = Sampling.describe(
            self.plan,
            [len(s.global_shape) for s in shards],
            [s.requires_grad() for s in shards],
        )
        self._probe = choose_probe(config.backend, self.plan, shards, self._bin_words)
        self._partial = PartialGradients(self.plan, shards)
        self.gain = gain
        self.inside = inside
        self.spectra = SpectraSweeps(inside.catalog, self._shards, device, ranks.rank)
        self._interval = config.interval
        on_cpu = device.type == "cpu"
        pool = HostPool(self._sizes(), ranks.rank, pinned=not on_cpu)
        if config.percentiles and not pool.sizes.bins and ranks.rank == 0:
            log.warning(
                "distmon: no gradient percentiles for a model of %d parameters; they are measured "
                "up to %d",
                len(shards),
                MOST_HISTOGRAMS,
            )
        kind = DeviceOutbox if ranks.on_device else HostOutbox
        self.outbox: HostOutbox[InFlight] = kind(ranks.observations, pool)
        self._device_buffers = None if on_cpu else Buffers(pool.sizes, ranks.rank, device)
        self._buffers = self._device_buffers or pool.take()
        self.losses = LossRing(self._loss_slots, device)
        self.tasks = TaskGradients(shards, config.seed)
        self._searches = self._make_searches()
        self._everything = frozenset(range(len(shards)))
        self._filled: frozenset[int] = frozenset()
        self._all_applied = torch.ones(len(shards), dtype=torch.float64, device=device)
        self._owner_columns = ownership.columns()
        self._row_multipliers = odd_multipliers(len(shards), device)
        classes = self.plan.replica_class.cpu().numpy()
        self._class_rows = [np.flatnonzero(classes == i) for i in range(REPLICA_CLASSES)]
        self._identities = ParameterIdentities(shards)
        self.device_clock = DeviceClock(device)
        self._no_checksums = torch.zeros(len(shards), dtype=torch.int64)
        self._side: Rows | None = None
        self._unreadable: set[str] = set()

    @property
    def _loss_slots(self) -> int:
        return min(self._interval, MOST_LOSSES)

    @property
    def _bin_words(self) -> int:
        if not self.config.percentiles or len(self._shards) > MOST_HISTOGRAMS:
            return 0
        return self.plan.bin_words(self._copies)

    def _sizes(self) -> BufferSizes:
        return BufferSizes(
            parameters=len(self._shards),
            ranks=self.ranks.size,
            bins=self._bin_words,
            losses=self._loss_slots,
            partial_gradients=self._partial.size,
            blocks=self.gain.size,
            inside=self.inside.catalog.sums,
            inside_maxima=self.inside.catalog.maxima,
        )

    def resize(self, interval: int) -> None:
        """Make room for the losses of another interval, right after an observation was started."""
        self._interval = interval
        if self._loss_slots == self.losses.capacity:
            return
        kept = self.losses.to_list()
        self.losses = LossRing(self._loss_slots, self.plan.device)
        self.losses.restore(kept)
        pool = self.outbox.pool = self.outbox.pool.resized(self._sizes())
        if self._device_buffers is not None:
            self._device_buffers = Buffers(pool.sizes, self.ranks.rank, self.plan.device)
        self._buffers = self._device_buffers or pool.take()

    @property
    def collective_bytes(self) -> int:
        """Bytes that this rank sends in one observation."""
        return self.outbox.pool.sizes.nbytes

    @property
    def agreement(self) -> dict[str, int]:
        """What must be equal on all ranks; see `agreement_hashes`."""
        return agreement_hashes(
            self.config,
            self.plan,
            self.sampling,
            (self.gain.blocks, self.inside.catalog),
            self._partial.rows,
        )

    @property
    def sent(self) -> int:
        """Observations that were sent, the empty ones included."""
        return self.outbox.posted

    @property
    def first_lr(self) -> Number:
        """Learning rate of this rank's first param group at the observed step; NaN without one."""
        return self._ownership.first_lr

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that train the observed parameters."""
        return self._ownership.optimizers

    @property
    def hook_seconds(self) -> float:
        """Time that the hooks on blocks and modules took in forward and backward passes so far."""
        return self.gain.hook_seconds + self.inside.watching.seconds

    @property
    def row_sums(self) -> torch.Tensor | None:
        """The sums of the rows that `measure` has filled; None before it has."""
        return None if self._buffers is None else self._buffers.rows.sums

    def snapshot(self) -> None:
        """Keep the sampled weights. Call it just before an optimizer step."""
        self._follow_replacements()
        with self.device_clock.span():
            self._probe.snapshot()

    def _follow_replacements(self) -> None:
        """Read what modules hold now, where parameters were replaced since attach.

        The samples stay the same, so the other ranks need not know.
        """
        replaced = self._identities.replaced(self._shards)
        if not replaced:
            return
        for each in replaced:
            self._shards[each.index] = each.shard
        level = logging.WARNING if self.ranks.rank == 0 else logging.INFO
        more = f" (and {len(replaced) - 1} others)" if len(replaced) > 1 else ""
        log.log(level, "distmon: parameter %s%s", replaced[0].sentence, more)
        self._ownership.refresh()
        self.plan = build_plan(self._shards, self._reading, self.config.seed, self.plan.device)
        self._probe = choose_probe(self.config.backend, self.plan, self._shards, self._bin_words)
        self._partial = PartialGradients(self.plan, self._shards)
        self._searches = self._make_searches()

    def _make_searches(self) -> Searches:
        check = self.config.replica_check
        return Searches(
            self.ranks, self.plan, self.count_nonfinite, check, lambda: self.losses.newest_step
        )

    def count_nonfinite(self) -> torch.Tensor:
        """Count NaN and Inf in all weights and gradients here; waits for the device once."""
        return self._probe.count_nonfinite()

    def measure(
        self, optimizer: torch.optim.Optimizer | None, ran: bool, read_in_full: Sequence[int] = ()
    ) -> None:
        """Fill the rows that `optimizer` has just stepped, while their gradients still exist.

        None means all rows that are not filled yet; without `ran` their gradients and updates
        count as not measured. The gradients of `read_in_full` are read in full.
        """
        buffers = self._buffers = self._buffers or self.outbox.pool.take()
        if buffers is None:  # too many observations are in flight; this one is sent empty
            return
        if not self._filled and self._partial.size:
            buffers.partial_gradients.zero_()
        mine = self._rows_to_fill(optimizer)
        if mine:
            with self.device_clock.span():
                self._measure(buffers, mine, optimizer, ran, read_in_full)

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
            self._probe.read_whole_gradients(buffers.rows, in_full)
        else:
            self._measure_some(buffers.rows, mine, applied, in_full)
        if not self._filled:
            # Before a scheduler changes the lr, and after the probe has read all parameters, which
            # are then in the cache.
            self._owner_columns = self._ownership.columns()
            if added := self._ownership.added():
                log.warning("distmon: %s", describe_added(added, self._shards))
        self._partial.move(buffers.rows, buffers.partial_gradients, applied, mine)
        for row in self._probe.without_grad:
            if row in mine:
                self._read_other_gradient(buffers.rows, row, applied[row])
        self._filled |= mine

    def _read_other_gradient(self, rows: Rows, row: int, applied: torch.Tensor) -> None:
        """Read a gradient that the probe cannot, or note that there is one."""
        shard = self._shards[row]
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
        applied = torch.zeros(len(self._shards), dtype=torch.float64)
        applied[sorted(rows)] = 1
        return to_device(applied, self.plan.device)

    def _measure_some(
        self, rows: Rows, mine: frozenset[int], applied: torch.Tensor, in_full: list[int]
    ) -> None:
        """Fill the rows of one of several optimizers: a probe fills all rows, copy these only."""
        if self._side is None:
            self._side = Rows.like(rows)
        self._probe.measure(self._side, applied)
        self._probe.read_whole_gradients(self._side, in_full)
        rows.take_from(self._side, to_device(torch.tensor(sorted(mine)), applied.device))

    @property
    def sample_is_nonfinite(self) -> bool:
        """Whether this rank has just sampled a NaN or Inf; False on an accelerator, where looking
        would wait for the device."""
        return isinstance(self._buffers, HostBuffers) and self._buffers.sample_has_nonfinite

    def start(
        self, step: int, slot: Mapping[str, Number], evidence: Evidence | None, error: str
    ) -> None:
        """Send the observation. Every rank calls this at the same step, whatever happened.

        What fails locally is sent as text instead of numbers, and as a last resort as a mark in
        memory that is already there; only a `CollectiveError` is raised.
        """
        buffers = self._buffers = self._buffers or self.outbox.pool.take()
        flight = self._nothing(step)
        try:
            flight = self._fill(step, slot, evidence, error)
        except Exception as problem:
            log.warning(
                "distmon: sending failed on rank %d (%s); continuing without this observation",
                self.ranks.rank,
                type(problem).__name__,
            )
            if buffers is not None:
                buffers.put_failure(step, self.plan.plan_hash)
        self._send(flight, buffers)

    def send_nothing(self, step: int) -> None:
        """Send an empty observation in place of one that failed before it could be sent."""
        buffers = self._device_buffers if self.ranks.on_device else None
        if buffers is not None:
            buffers.put_failure(step, self.plan.plan_hash)
        self._send(self._nothing(step), buffers)

    def _nothing(self, step: int) -> InFlight:
        return InFlight(LocalEvidence(step, None, self._no_checksums, None), self._interval)

    def _send(self, flight: InFlight, buffers: Buffers | None) -> None:
        step = flight.local.step
        shipment = Shipment(self.sent + 1, step, self.plan.plan_hash, flight)
        self._filled = frozenset()
        self._buffers = self._device_buffers
        self.outbox.post(shipment, buffers)

    def _fill(
        self, step: int, slot: Mapping[str, Number], evidence: Evidence | None, error: str
    ) -> InFlight:
        """Fill what is sent; return what this rank keeps until it has arrived."""
        steps, values, given = self.losses.take()
        kept = LocalEvidence(step, evidence, self._probe.row_checksums.clone(), self.tasks.take())
        buffers = self._buffers
        if buffers is not None:
            identity = self._identity(step, failed=bool(error))
            if not error:
                try:
                    self._fill_buffers(buffers, {**slot, **identity}, values, given)
                except Exception as problem:
                    error = f"send: {type(problem).__name__}: {problem}"
            if error:
                buffers.clear()
                known = slot.get("nonfinite_known", 0.0)
                buffers.put_slot({**identity, "nonfinite_known": known, "failed": 1.0}, (), error)
        own = [(at, values[i]) for i, at in enumerate(steps) if given[i]]
        return InFlight(kept, self._interval, steps, own)

    def _fill_buffers(
        self,
        buffers: Buffers,
        telemetry: Mapping[str, Number],
        values: torch.Tensor | Floats,
        given: Floats,
    ) -> None:
        buffers.put_owners(self._owner_columns)
        for rows, rate in self._ownership.device_rates:
            index = to_device(torch.from_numpy(rows), self.plan.device)
            buffers.rows.sums[index, LR_COLUMN] = rate.to(torch.float64)
        buffers.put_slot(telemetry, self._checksums(), "")
        buffers.put_losses(values, given)
        self.gain.send(buffers.blocks)
        self.inside.send(buffers.inside, buffers.inside_maxima)

    def _checksums(self) -> torch.Tensor | list[int]:
        """Return 48 bits by replica class over all sampled weights of this rank, on its device."""
        if self.plan.device.type == "cpu":
            on_host = self._probe.row_checksums.numpy() * self._row_multipliers.numpy()
            by_class = (on_host[rows].sum() if len(rows) else 0 for rows in self._class_rows)
            return [int(each) & _48_BITS for each in by_class]
        sums = torch.zeros(REPLICA_CLASSES, dtype=torch.int64, device=self.plan.device)
        weighted = self._probe.row_checksums * self._row_multipliers
        return sums.index_add_(0, self.plan.replica_class, weighted) & _48_BITS

    def _identity(self, step: int, failed: bool) -> dict[str, float]:
        return {
            "time": time.time(),
            "step": float(step),
            "plan_hash": float(self.plan.plan_hash),
            **{f"region_key{i}": float(key) for i, key in enumerate(self.plan.region_keys)},
            "failed": float(failed),
        }

    @property
    def losses_in_flight(self) -> list[tuple[int, float]]:
        """This rank's own losses in observations that have not arrived. Waits for the device."""
        flights = [shipment.kept for shipment in self.outbox.shipments]
        return [(at, float(loss)) for flight in flights for at, loss in flight.losses]

    def unpack(self, shipment: Shipment[InFlight]) -> Arrived:
        """Return an observation that has arrived, with its searches."""
        return Arrived(shipment, self._partial, self._searches)
