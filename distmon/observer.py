"""One observation from beginning to end: snapshot, measure, reduce, record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from csrc_triton.row_layout import SUM
from distmon.config import MonitorConfig
from distmon.derive import Sampling, param_table, run_metrics, suspects
from distmon.layout import Shard
from distmon.localise import SIGNALS, find_desync, locate_desync, locate_nonfinite
from distmon.losses import LossEma, LossRing
from distmon.ownership import Ownership
from distmon.probe import choose_probe
from distmon.probe.exact import nonfinite_counts
from distmon.record import Desync, NonFinite, Record
from distmon.reduce import Buffers, Ranks, Reduced
from distmon.sampling import build_plan
from distmon.signals import Evidence

DEFAULT_SAMPLE = 1024
_OWNERSHIP_COLUMNS = slice(SUM["holders"], SUM["lr"] + 1)


class Observer:
    """Owns the tables and buffers of one rank. Everything it makes is allocated here, once."""

    def __init__(
        self,
        shards: Sequence[Shard],
        ownership: Ownership,
        ranks: Ranks,
        config: MonitorConfig,
        frozen_ratio: float,
    ) -> None:
        self._shards = shards
        self._ownership = ownership
        self._ranks = ranks
        self._config = config
        self._frozen_ratio = frozen_ratio
        exact = config.sample_size == "exact"
        size = DEFAULT_SAMPLE if config.sample_size == "exact" else config.sample_size
        device = shards[0].weight().device
        self.plan = build_plan(shards, size, config.seed, device)
        self._sampling = Sampling.describe(
            self.plan.names, self.plan.samples, [s.requires_grad() for s in shards], exact
        )
        self._probe = choose_probe(config.backend, self.plan, shards, exact)
        self._buffers = Buffers(len(shards), ranks, config.percentiles, config.interval, device)
        self.ring = LossRing(config.interval, device)
        self.ema = LossEma(config.ema_decay)
        self._suspects: list[int] = []
        self._steps = 0
        self._start_step = 0

    @property
    def collective_bytes(self) -> int:
        """Bytes that this rank sends in one observation."""
        return self._buffers.nbytes

    def snapshot(self) -> None:
        """Just before the optimizer step."""
        self._probe.snapshot()

    def measure(self, stepped: Sequence[torch.optim.Optimizer], any_step: bool) -> None:
        """Just after the step, while its gradients still exist.

        `stepped` are the optimizers that ran since the snapshot; `any_step` is False when none did.
        """
        applied = self._ownership.applied(stepped, any_step, self.plan.device)
        rows = self._buffers.rows
        self._probe.measure(rows, applied)
        self._probe.read_whole_gradients(rows, self._suspects)
        columns = self._ownership.columns()
        rows.sums[:, _OWNERSHIP_COLUMNS] = columns.to(self.plan.device, non_blocking=True)

    def clear(self) -> None:
        """Nothing could be measured: send rows that add nothing."""
        self._buffers.rows.clear()

    def start(self, step: int, telemetry: Mapping[str, float], error: str) -> None:
        """Enter the collectives. Every rank calls this at the same step, whatever happened."""
        identity = {
            "step": float(step),
            "plan_hash": float(self.plan.plan_hash),
            "region_key": float(self.plan.region_key),
            "failed": float(bool(error)),
        }
        checksum = None if error else self._probe.checksum()
        self._buffers.put_telemetry({**telemetry, **identity}, checksum, error)
        values, given = self.ring.take()
        self._steps, self._start_step = len(given), step - len(given) + 1
        self._buffers.put_losses(values, given)
        self._buffers.start()

    def finish(
        self, step: int, evidence: Evidence | None, known_bad: bool, lr: float | None
    ) -> Record:
        """The record of the observation that was started at `step`.

        `evidence` is this rank's own; `known_bad` says that an earlier record already located the
        NaN that is still there. Both searches below are collective, and every rank decides on them
        from the same reduced numbers.
        """
        reduced = self._buffers.finish(self._steps)
        nonfinite = None if known_bad else self._locate_nonfinite(reduced, step, evidence)
        desync = self._locate_desync(reduced)
        table = param_table(reduced, self._sampling, self._config.eps, self._frozen_ratio)
        self._suspects = suspects(table, self._sampling, self._frozen_ratio)
        metrics = run_metrics(reduced, table, self._sampling, self._config.topk)
        losses = {
            self._start_step + int(i): float(reduced.losses[i])
            for i in np.flatnonzero(reduced.loss_given)
        }
        averages: dict[int, float] = {}
        for at, loss in losses.items():
            value = self.ema.update(loss)
            if value is not None:
                averages[at] = value
        if losses:
            metrics["train/step_loss"] = [*losses.values()][-1]
        if averages:
            metrics["train/step_loss_ema"] = [*averages.values()][-1]
        metrics["train/lr"] = float(table.columns["lr"][0]) if lr is None else lr
        metrics |= self._performance(reduced)
        return Record(
            step=step,
            time=float(reduced.ranks["time"][0]),
            world_size=self._ranks.size,
            metrics=metrics,
            params=table,
            ranks=reduced.ranks,
            losses=losses,
            loss_ema=averages,
            applied=bool(reduced.sums[:, SUM["u_count"]].any()),
            nonfinite=nonfinite,
            desync=desync,
            faults=self._faults(reduced, step),
        )

    def _locate_nonfinite(
        self, reduced: Reduced, step: int, evidence: Evidence | None
    ) -> NonFinite | None:
        signalled = reduced.ranks["signal_step"]
        bad = [SUM[f"{what}_{kind}"] for what in "wg" for kind in ("nan", "inf")]
        sampled = reduced.sums[:, bad].any()
        if not signalled.any() and not sampled:
            return None
        if signalled.any():
            first_step = int(signalled[signalled > 0].min())
            first_rank = int(np.flatnonzero(signalled == first_step)[0])
            signal = int(reduced.ranks["signal_kind"][first_rank])
            mine = evidence.counts if evidence else torch.zeros((len(self._shards), 4)).long()
            mine_step = evidence.step if evidence else 0
        else:
            first_step, signal = step, SIGNALS.index("sample")
            mine, mine_step = nonfinite_counts(self._shards), step
        return locate_nonfinite(
            self._ranks, self.plan.names, mine, mine_step, first_step, signal, self.plan.device
        )

    def _locate_desync(self, reduced: Reduced) -> Desync | None:
        found = find_desync(reduced.ranks) if self._config.replica_check else None
        if found is None:
            return None
        return locate_desync(self._ranks, self.plan.names, self._probe.row_checksums, found)

    def _performance(self, reduced: Reduced) -> dict[str, float]:
        seconds = float(reduced.ranks["step_seconds"].max())
        own = float(reduced.ranks["monitor_seconds"].max())
        metrics = {
            "train/skipped_steps": float(reduced.ranks["skipped_steps"].max()),
            "performance/monitor_seconds": own,
            "performance/monitor_bytes": float(self.collective_bytes),
            "performance/monitor_collectives": 2.0 if self._ranks.together else 0.0,
        }
        if seconds > 0:
            elapsed = seconds * self._steps
            metrics["performance/step_seconds"] = seconds
            metrics["performance/monitor_fraction"] = own / elapsed
            tokens = float(reduced.ranks["tokens"].sum())
            if tokens:
                metrics["performance/tokens_per_second"] = tokens / elapsed
        return metrics

    def _faults(self, reduced: Reduced, step: int) -> tuple[str, ...]:
        faults = [f"rank {r} could not observe step {step}: {t}" for r, t in reduced.errors.items()]
        for what, words in (
            ("step", "counts steps differently"),
            ("plan_hash", "samples other elements"),
        ):
            values = reduced.ranks[what]
            majority = max({*values.tolist()}, key=lambda v: int((values == v).sum()))
            faults += [f"rank {r} {words}" for r in np.flatnonzero(values != majority)]
        return tuple(faults)
