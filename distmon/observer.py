"""The part of an observation that touches tensors and ranks: snapshot, measure, reduce, search."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

import numpy as np
import torch

from csrc_triton.row_layout import MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.config import MonitorConfig
from distmon.derive import Sampling
from distmon.device_marks import to_device
from distmon.flow import BackwardNorms
from distmon.layout import Shard
from distmon.localise import SIGNALS, find_desync, locate_desync, locate_nonfinite
from distmon.losses import Floats, LossRing
from distmon.metrics import REPLICA_CLASSES
from distmon.ownership import Ownership, scaler_verdict
from distmon.probe import Rows, choose_probe
from distmon.probe.added_gradients import AddedGradients
from distmon.probe.exact import nonfinite_counts
from distmon.probe.torch_twin import odd_multipliers
from distmon.record import Desync, NonFinite
from distmon.recording import Observation
from distmon.reduce import SLOT_SIZE, Buffers, Ranks, Reduced, buffers_on
from distmon.sampling import build_plan, hash48
from distmon.signals import Evidence
from distmon.tasks import TaskGradients

DEFAULT_SAMPLE = 1024
MOST_LOSSES = 4096
"""Steps whose losses an observation tells; of a longer interval the last ones."""
_48_BITS = (1 << 48) - 1
_MAY_DIFFER = {"run_dir", "sinks", "wandb", "queue_size", "total_steps", "param_tags"}
_MAY_DIFFER |= {"param_tag_cap", "backend", "timeout_s", "notify"}
"""Settings that matter to one rank alone."""
AGREED = ("versions", "parameters or shapes", "settings")
"""What all ranks must have in common, as it is called when they have not."""
log = logging.getLogger("distmon")


class Observer:
    """Owns the tables and buffers of one rank. Everything it makes is allocated here, once."""

    def __init__(
        self,
        shards: Sequence[Shard],
        ownership: Ownership,
        ranks: Ranks,
        config: MonitorConfig,
        flow: BackwardNorms,
    ) -> None:
        self._shards = shards
        self._ownership = ownership
        self._ranks = ranks
        self._config = config
        exact = config.sample_size == "exact"
        size = DEFAULT_SAMPLE if config.sample_size == "exact" else config.sample_size
        device = shards[0].weight().device
        self.plan = build_plan(shards, size, config.seed, device, exact)
        self.sampling = Sampling.describe(
            self.plan.names,
            self.plan.samples,
            [len(s.global_shape) for s in shards],
            [s.requires_grad() for s in shards],
            exact,
        )
        self._probe = choose_probe(config.backend, self.plan, shards, exact)
        self._added = AddedGradients(self.plan, shards)
        self.flow = flow
        self._interval = config.interval
        self._buffers = self._make_buffers()
        self.ring = LossRing(self._loss_slots, device)
        self.tasks = TaskGradients(shards, config.seed, ranks)
        self._steps: list[int] = []
        self._everything = frozenset(range(len(shards)))
        self._filled: frozenset[int] = frozenset()
        self._all_applied = torch.ones(len(shards), dtype=torch.float64, device=device)
        self._owner_columns = ownership.columns()
        self._row_multipliers = odd_multipliers(len(shards), device)
        classes = self.plan.replica_class.cpu().numpy()
        self._class_rows = [np.flatnonzero(classes == i) for i in range(REPLICA_CLASSES)]
        self._side: Rows | None = None

    @property
    def _loss_slots(self) -> int:
        return min(self._interval, MOST_LOSSES)

    def _make_buffers(self) -> Buffers:
        return buffers_on(self.plan.device)(
            len(self._shards),
            self._ranks,
            self._config.percentiles,
            self._loss_slots,
            self.plan.device,
            self._added.size,
            self.flow.size,
        )

    def resize(self, interval: int) -> None:
        """Make room for the losses of another interval. Nothing may be in flight."""
        self._interval = interval
        if self._loss_slots == self.ring.capacity:
            return
        kept = self.ring.to_list()
        self.ring = LossRing(self._loss_slots, self.plan.device)
        self.ring.restore(kept)
        old, self._buffers = self._buffers, self._make_buffers()
        self._buffers.take_rows(old)

    @property
    def collective_bytes(self) -> int:
        """Bytes that this rank sends in one observation."""
        return self._buffers.nbytes

    @property
    def agreement(self) -> dict[str, int]:
        """What must be equal on all ranks, each as 48 bits: what is sampled, sent and decided."""
        settings = self._config.model_dump_json(exclude=_MAY_DIFFER)
        trainable = self.sampling.trainable.tolist()
        sent = (SLOT_SIZE, SUM_COLUMNS, MAX_COLUMNS, self._added.rows)
        texts = (
            f"{metadata.version('distmon')}{sent}",
            f"{self.plan.plan_hash}{trainable}{self.flow.blocks}",
            settings,
        )
        return {name: hash48(text) for name, text in zip(AGREED, texts, strict=True)}

    def snapshot(self) -> None:
        """Just before an optimizer step."""
        self._probe.snapshot()

    def measure(
        self, optimizer: torch.optim.Optimizer | None, ran: bool, suspects: Sequence[int] = ()
    ) -> None:
        """Fill the rows that `optimizer` has just stepped, while their gradients still exist.

        None means all rows that are not filled yet; without `ran` their gradients and updates
        count as not measured. Of `suspects` the whole gradient is read.
        """
        if not self._filled and self._added.size:
            self._buffers.addends.zero_()
        mine = self._rows_to_fill(optimizer)
        if not mine:
            return
        applied = self._applied(mine if ran else frozenset())
        verdict = scaler_verdict(optimizer)
        if verdict is not None:
            applied = applied * (1 - verdict.to(applied).reshape(()))
        suspected = [i for i in suspects if i in mine]
        if mine == self._everything:
            self._probe.measure(self._buffers.rows, applied)
            self._probe.read_whole_gradients(self._buffers.rows, suspected)
        else:
            self._measure_some(mine, applied, suspected)
        if not self._filled:
            # Before a scheduler changes the lr, and after the probe has looked at all parameters,
            # which are far away in memory.
            self._owner_columns = self._ownership.columns()
        self._added.move(self._buffers.rows, self._buffers.addends, applied, mine)
        for row in self._probe.without_grad:
            if row in mine and self._shards[row].grad_is_unreadable():
                self._buffers.rows.sums[row, SUM["g_unreadable"]] = 1.0
        self._filled |= mine

    def _rows_to_fill(self, optimizer: torch.optim.Optimizer | None) -> frozenset[int]:
        if optimizer is None:
            return self._everything - self._filled if self._filled else self._everything
        mine = self._ownership.rows_of(optimizer)
        if not self._filled:
            mine = mine | self._ownership.unowned()
        return frozenset(mine - self._filled)

    def _applied(self, rows: frozenset[int]) -> torch.Tensor:
        """1 for each of these rows, on the device."""
        if rows == self._everything:
            return self._all_applied
        applied = torch.zeros(len(self._shards), dtype=torch.float64)
        applied[sorted(rows)] = 1
        return to_device(applied, self.plan.device)

    def _measure_some(
        self, mine: frozenset[int], applied: torch.Tensor, suspected: list[int]
    ) -> None:
        """Several optimizers: a probe reads all rows, so those of one are taken out of its own."""
        if self._side is None:
            self._side = Rows.like(self._buffers.rows)
        self._probe.measure(self._side, applied)
        self._probe.read_whole_gradients(self._side, suspected)
        self._buffers.rows.take_from(
            self._side, to_device(torch.tensor(sorted(mine)), applied.device)
        )

    def start(self, step: int, telemetry: Mapping[str, float], knows_bad: bool, error: str) -> None:
        """Enter the collectives. Every rank calls this at the same step, whatever happened.

        `knows_bad`: an earlier record has already located the NaN that is still there. What fails
        locally is sent as text instead of numbers; only a `CollectiveError` gets out.
        """
        self._steps, values, given = self.ring.take()
        identity = self._identity(step, knows_bad, failed=bool(error))
        if not error:
            try:
                self._fill_buffers({**telemetry, **identity}, values, given)
            except Exception as problem:
                error = f"send: {type(problem).__name__}: {problem}"
        if error:
            self._buffers.clear()
            self._buffers.put_telemetry({**identity, "failed": 1.0}, (), error)
        self._filled = frozenset()
        self._buffers.start()

    def _fill_buffers(
        self, telemetry: Mapping[str, float], values: torch.Tensor | Floats, given: Floats
    ) -> None:
        self._buffers.put_owners(self._owner_columns)
        self._buffers.put_telemetry(telemetry, self._checksums(), "")
        self._buffers.put_losses(values, given)
        self.flow.send(self._buffers.blocks)

    def _checksums(self) -> torch.Tensor | list[int]:
        """48 bits by replica class over all sampled weights of this rank, on its device."""
        if self.plan.device.type == "cpu":
            on_host = self._probe.row_checksums.numpy() * self._row_multipliers.numpy()
            return [int(on_host[rows].sum()) & _48_BITS for rows in self._class_rows]
        sums = torch.zeros(REPLICA_CLASSES, dtype=torch.int64, device=self.plan.device)
        weighted = self._probe.row_checksums * self._row_multipliers
        return sums.index_add_(0, self.plan.replica_class, weighted) & _48_BITS

    def _identity(self, step: int, knows_bad: bool, failed: bool) -> dict[str, float]:
        return {
            "time": time.time(),
            "step": float(step),
            "plan_hash": float(self.plan.plan_hash),
            **{f"region_key{i}": float(key) for i, key in enumerate(self.plan.region_keys)},
            "failed": float(failed),
            "knows_bad": float(knows_bad),
        }

    def losses_in_flight(self) -> list[tuple[int, float]]:
        """The losses of an observation that was started and not finished. Waits for the device."""
        return self._buffers.finish(len(self._steps)).losses_by_step(self._steps)

    def finish(
        self, step: int, evidence: Evidence | None, lr: float | None, search: bool = True
    ) -> Observation:
        """What the observation that was started at `step` has found, with nothing derived yet.

        `evidence` is this rank's own. The searches are collective; every rank decides on them from
        the same reduced numbers and nothing else, and `search=False` leaves them out.
        """
        reduced = self._buffers.finish(len(self._steps))
        self._added.fill(reduced.addends, reduced.sums, reduced.maxima, reduced.bins)
        nonfinite = desync = None
        tasks: dict[str, float] = {}
        if search:
            nonfinite = self._locate_nonfinite(reduced, step, evidence)
            desync = self._locate_desync(reduced)
            tasks = self.tasks.norms(reduced.ranks["task_key"].tolist())
        return Observation(
            step=step,
            reduced=reduced,
            losses=dict(reduced.losses_by_step(self._steps)),
            lr=lr,
            nbytes=self.collective_bytes,
            interval=self._interval,
            nonfinite=nonfinite,
            desync=desync,
            tasks=tasks,
        )

    def _locate_nonfinite(
        self, reduced: Reduced, step: int, evidence: Evidence | None
    ) -> NonFinite | None:
        signalled = reduced.ranks["signal_step"]
        bad = [SUM[f"{what}_{kind}"] for what in "wg" for kind in ("nan", "inf")]
        sampled = reduced.sums[:, bad].any()
        if reduced.ranks["knows_bad"].all() or not (signalled.any() or sampled):
            return None
        if signalled.any():
            first_step = int(signalled[signalled > 0].min())
            first_rank = int(np.flatnonzero(signalled == first_step)[0])
            signal = int(reduced.ranks["signal_kind"][first_rank])
            mine = evidence.counts if evidence else torch.zeros((len(self._shards), 4)).long()
            mine_step = evidence.step if evidence else 0
        else:
            first_step, signal = step, SIGNALS.index("sample")
            mine, mine_step = self._count_nonfinite(), step
        return locate_nonfinite(
            self._ranks, self.plan.names, mine, mine_step, first_step, signal, self.plan.device
        )

    def _count_nonfinite(self) -> torch.Tensor:
        """Between two collectives nothing may fail: then this rank has nothing to tell."""
        try:
            return nonfinite_counts(self._shards)
        except Exception as error:
            log.warning("rank %d could not look for NaN: %s", self._ranks.rank, error)
            return torch.zeros((len(self._shards), 4), dtype=torch.int64)

    def _locate_desync(self, reduced: Reduced) -> Desync | None:
        found = find_desync(reduced.ranks) if self._config.replica_check else None
        if found is None:
            return None
        return locate_desync(self._ranks, self.plan, self._probe.row_checksums, found)
