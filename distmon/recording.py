"""From what an observation found to the record: everything that needs no other rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from csrc_triton.row_layout import SUM
from distmon.config import MonitorConfig
from distmon.derive import Sampling, moments, param_table, run_metrics, suspects
from distmon.evaluations import EvaluationHistory, evaluation_metrics
from distmon.flow import Blocks, GainWindow, flow_table
from distmon.losses import LossEma
from distmon.metrics import RANK_METRICS
from distmon.record import Desync, NonFinite, ParamTable, Record
from distmon.reduce import Reduced, minority
from distmon.tasks import task_metrics
from distmon.telemetry.summary import run_summary, without_waiting
from distmon.telemetry.utilization import Utilization

_NOT_FINITE = [SUM[f"{what}_{kind}"] for what in "wg" for kind in ("nan", "inf")]


@dataclass(frozen=True)
class Observation:
    """What all ranks know after the collectives of one observation, with nothing derived yet."""

    step: int
    reduced: Reduced
    losses: Mapping[int, float]
    """By step since the last observation, mean over ranks."""
    lr: float | None
    """As the trainer told it; without that the optimizer's counts."""
    nbytes: int
    """Sent by one rank."""
    interval: int
    """Steps from one observation to the next, when this one was made."""
    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    tasks: Mapping[str, float] | None = None

    @property
    def sample_has_nonfinite(self) -> bool:
        """Whether any sampled weight or gradient is NaN or Inf."""
        return bool(self.reduced.sums[:, _NOT_FINITE].any())

    @property
    def has_nonfinite(self) -> bool:
        """Whether anything is NaN or Inf that should not be; as `Record.has_nonfinite`."""
        losses_finite = all(map(np.isfinite, self.losses.values()))
        return self.nonfinite is not None or not losses_finite or self.sample_has_nonfinite


class Recorder:
    """Derives records, one after another, and keeps what goes on from one to the next."""

    def __init__(
        self,
        config: MonitorConfig,
        sampling: Sampling,
        blocks: Blocks,
        frozen_ratio: float,
        world_size: int,
        collectives: int,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """`collectives` that ranks enter in one observation."""
        self._config = config
        self._sampling = sampling
        self._blocks = blocks
        self._frozen_ratio = frozen_ratio
        self._world_size = world_size
        self._collectives = collectives
        self._hosts = hosts
        self.ema = LossEma(config.ema_decay)
        self.gain = GainWindow(config.flow.window, blocks.longest)
        self.evaluations = EvaluationHistory()
        self.utilization = Utilization()
        self.suspects: list[int] = []
        """Parameters whose whole gradient should be read at the next observation."""

    def record(self, found: Observation) -> Record:
        """The record of an observation; the same on every rank."""
        reduced = replace(found.reduced, ranks=without_waiting(found.reduced.ranks))
        estimates = moments(reduced, self._sampling)
        table = param_table(
            reduced, estimates, self._sampling, self._config.eps, self._frozen_ratio
        )
        self.suspects = suspects(table, self._sampling, self._frozen_ratio)
        metrics = run_metrics(reduced, estimates, table, self._sampling, self._config.topk)
        losses = dict(found.losses)
        averages: dict[int, float] = {}
        for at, loss in losses.items():
            value = self.ema.update(loss)
            if value is not None:
                averages[at] = value
        if losses:
            metrics["train/step_loss"] = [*losses.values()][-1]
        if averages:
            metrics["train/step_loss_ema"] = [*averages.values()][-1]
        metrics["train/lr"] = float(table.columns["lr"][0]) if found.lr is None else found.lr
        evaluations = self.evaluations.receive(reduced.ranks, self.ema.value)
        if evaluations:
            metrics |= evaluation_metrics(evaluations[-1])
        tasks = dict(found.tasks or {})
        metrics |= task_metrics(tasks)
        applied = bool(reduced.sums[:, SUM["u_count"]].any())
        flow = None
        # Without a rank it would be the gain of a part of the batch; what a scaler skips is noise.
        if applied and not reduced.ranks["failed"].any():
            flow = flow_table(self._blocks.names, reduced.blocks)
        metrics |= self.gain.metrics(flow)
        norms = reduced.ranks["shown_norm"][reduced.ranks["failed"] == 0]
        if (norms != -1).any():
            metrics["train/unclipped_grad_norm"] = float(norms[norms != -1].max())
        metrics |= self._performance(found, reduced)
        return Record(
            step=found.step,
            time=float(reduced.ranks["time"][0]),
            world_size=self._world_size,
            metrics=metrics,
            params=table,
            ranks={n: row for n, row in reduced.ranks.items() if not np.isnan(row).all()},
            hosts=self._hosts,
            mfu_source=self.utilization.source,
            losses=losses,
            loss_ema=averages,
            applied=applied,
            flow=flow,
            evaluations=evaluations,
            tasks=tasks,
            nonfinite=found.nonfinite,
            desync=found.desync,
            faults=_faults(reduced, found.step),
        )

    def late_record(self, step: int, told: Mapping[str, float], lr: float | None) -> Record:
        """What this rank was told after the last observation, as a record."""
        slots = {m.name: np.array([told.get(m.name, 0.0)]) for m in RANK_METRICS}
        evaluations = self.evaluations.receive(slots, self.ema.value)
        return Record(
            step=step,
            time=time.time(),
            world_size=self._world_size,
            metrics={
                **(evaluation_metrics(evaluations[-1]) if evaluations else {}),
                **({} if lr is None else {"train/lr": lr}),
            },
            params=ParamTable.empty(),
            ranks={},
            applied=False,
            evaluations=evaluations,
            partial=True,
        )

    def _performance(self, found: Observation, reduced: Reduced) -> dict[str, float]:
        metrics = {
            "train/skipped_steps": float(reduced.ranks["skipped_steps"].max()),
            "performance/monitor_seconds": float(reduced.ranks["monitor_seconds"].max()),
            "performance/monitor_bytes": float(found.nbytes),
            "performance/monitor_collectives": float(self._collectives),
            "performance/interval": float(found.interval),
            **run_summary(reduced.ranks),
        }
        return metrics | self.utilization.metrics(metrics, self._world_size)


def _faults(reduced: Reduced, step: int) -> tuple[str, ...]:
    faults = [f"rank {r} could not observe step {step}: {t}" for r, t in reduced.errors.items()]
    for what, words in (
        ("step", "counts steps differently"),
        ("plan_hash", "samples other elements"),
        ("task_key", "measured other tasks, or on other parameters"),
    ):
        others = minority(reduced.ranks[what].tolist())
        faults += [f"rank {r} {words}" for r in others]
    return tuple(faults)
