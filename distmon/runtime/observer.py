"""What a rank sends of an observation: buffers that are filled, launched and taken apart again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from distmon.collect.finite_watch import Evidence
from distmon.collect.gradient_gain import BackwardNorms
from distmon.collect.inside.inside import Inside
from distmon.collect.losses import Floats, LossRing, Number
from distmon.collect.task_gradients import TaskGradients
from distmon.config import MonitorConfig
from distmon.reduce.buffers import Buffers, HostBuffers, HostPool
from distmon.reduce.outbox import DeviceOutbox, HostOutbox, Shipment
from distmon.reduce.process_group import Ranks
from distmon.reduce.reduced_view import BufferSizes
from distmon.runtime.agreement import agreement_hashes
from distmon.runtime.arrived import Arrived, InFlight
from distmon.runtime.row_measurement import MOST_HISTOGRAMS, RowMeasurement
from distmon.runtime.searches import LocalEvidence, Searches
from distmon.runtime.spectra_sweeps import SpectraSweeps

log = logging.getLogger("distmon")
MOST_LOSSES = 4096
"""Most steps whose losses one observation sends; of a longer interval the last ones."""


class Observer:
    """Owns what one rank measures, and the buffers that it is sent in, which are allocated once.

    Used by the training thread only.
    """

    def __init__(
        self,
        rows: RowMeasurement,
        ranks: Ranks,
        config: MonitorConfig,
        gain: BackwardNorms,
        inside: Inside,
    ) -> None:
        self.rows = rows
        self.ranks = ranks
        self.config = config
        self.gain = gain
        self.inside = inside
        self.spectra = SpectraSweeps(inside.catalog, rows.shards, rows.device, ranks.rank)
        self._interval = config.interval
        on_cpu = rows.device.type == "cpu"
        pool = HostPool(self._sizes(), ranks.rank, pinned=not on_cpu)
        if config.percentiles and not pool.sizes.bins and ranks.rank == 0:
            log.warning(
                "distmon: no gradient percentiles for a model of %d parameters; they are measured "
                "up to %d",
                len(rows.shards),
                MOST_HISTOGRAMS,
            )
        kind = DeviceOutbox if ranks.on_device else HostOutbox
        self.outbox: HostOutbox[InFlight] = kind(ranks.observations, pool)
        self._device_buffers = None if on_cpu else Buffers(pool.sizes, ranks.rank, rows.device)
        self._buffers = self._device_buffers or pool.take()
        self.losses = LossRing(self._loss_slots, rows.device)
        self.tasks = TaskGradients(rows.shards, config.seed)
        self._no_checksums = torch.zeros(len(rows.shards), dtype=torch.int64)
        self._searches = Searches(
            ranks,
            lambda: rows.plan,  # another one once a parameter was replaced
            rows.count_nonfinite,
            config.replica_check,
            lambda: self.losses.newest_step,
        )

    @property
    def _loss_slots(self) -> int:
        return min(self._interval, MOST_LOSSES)

    def _sizes(self) -> BufferSizes:
        return BufferSizes(
            parameters=len(self.rows.shards),
            ranks=self.ranks.size,
            bins=self.rows.bin_words,
            losses=self._loss_slots,
            partial_gradients=self.rows.partial.size,
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
        self.losses = LossRing(self._loss_slots, self.rows.device)
        self.losses.restore(kept)
        pool = self.outbox.pool = self.outbox.pool.resized(self._sizes())
        if self._device_buffers is not None:
            self._device_buffers = Buffers(pool.sizes, self.ranks.rank, self.rows.device)
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
            self.rows.plan,
            self.rows.sampling,
            (self.gain.blocks, self.inside.catalog),
            self.rows.partial.rows,
        )

    @property
    def sent(self) -> int:
        """Observations that were sent, the empty ones included."""
        return self.outbox.posted

    @property
    def hook_seconds(self) -> float:
        """Time that the hooks on blocks and modules took in forward and backward passes so far."""
        return self.gain.hook_seconds + self.inside.watching.seconds

    @property
    def row_sums(self) -> torch.Tensor | None:
        """The sums of the rows that `measure` has filled; None before it has.

        None, too, where the step was skipped: the snapshot is then that of an earlier step.
        """
        if self._buffers is None or not self.rows.has_snapshot:
            return None
        return self._buffers.rows.sums

    @property
    def buffers(self) -> Buffers | None:
        """Those of the coming observation; None while too many are in flight: it is sent empty."""
        self._buffers = self._buffers or self.outbox.pool.take()
        return self._buffers

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
        buffers = self.buffers
        try:
            flight = self._fill(step, slot, evidence, error)
        except Exception as problem:
            log.warning(
                "distmon: sending failed on rank %d (%s); continuing without this observation",
                self.ranks.rank,
                type(problem).__name__,
            )
            flight = self._nothing(step)
            if buffers is not None:
                buffers.put_failure(step, self.rows.plan.plan_hash)
        self._send(flight, buffers)

    def send_nothing(self, step: int) -> None:
        """Send an empty observation in place of one that failed before it could be sent."""
        buffers = self._device_buffers if self.ranks.on_device else None
        if buffers is not None:
            buffers.put_failure(step, self.rows.plan.plan_hash)
        self._send(self._nothing(step), buffers)

    def _nothing(self, step: int) -> InFlight:
        return InFlight(LocalEvidence(step, None, self._no_checksums, None), self._interval)

    def _send(self, flight: InFlight, buffers: Buffers | None) -> None:
        step = flight.local.step
        shipment = Shipment(self.sent + 1, step, self.rows.plan.plan_hash, flight)
        self.rows.begin_anew()
        self._buffers = self._device_buffers
        self.outbox.post(shipment, buffers)

    def _fill(
        self, step: int, slot: Mapping[str, Number], evidence: Evidence | None, error: str
    ) -> InFlight:
        """Fill what is sent; return what this rank keeps until it has arrived."""
        steps, values, given = self.losses.take()
        kept = LocalEvidence(step, evidence, self.rows.row_checksums.clone(), self.tasks.take())
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
        self.rows.put_owners(buffers)
        buffers.put_slot(telemetry, self.rows.checksums(), "")
        buffers.put_losses(values, given)
        self.gain.send(buffers.blocks)
        self.inside.send(buffers.inside, buffers.inside_maxima)

    def _identity(self, step: int, failed: bool) -> dict[str, float]:
        return {
            "time": time.time(),
            "step": float(step),
            "plan_hash": float(self.rows.plan.plan_hash),
            **{f"region_key{i}": float(key) for i, key in enumerate(self.rows.plan.region_keys)},
            "failed": float(failed),
        }

    @property
    def losses_in_flight(self) -> list[tuple[int, float]]:
        """This rank's own losses in observations that have not arrived. Waits for the device."""
        flights = [shipment.kept for shipment in self.outbox.shipments]
        return [(at, float(loss)) for flight in flights for at, loss in flight.losses]

    def unpack(self, shipment: Shipment[InFlight]) -> Arrived:
        """Return an observation that has arrived, with its searches."""
        return Arrived(shipment, self.rows.partial, self._searches)
