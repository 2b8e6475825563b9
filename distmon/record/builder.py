"""Derive the record of an observation from its reduced numbers; needs no other rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from csrc_triton.row_layout import SUM
from distmon.collect.gradient_gain import Blocks
from distmon.collect.telemetry.utilization import Utilization
from distmon.config import MonitorConfig
from distmon.metrics import RANK_METRICS
from distmon.record.evaluations import EvaluationHistory, evaluation_metrics
from distmon.record.gradient_gain import GainWindow, gain_table
from distmon.record.loss_ema import LossEma
from distmon.record.record import Column, ParamTable, Record
from distmon.record.statistics import (
    Sampling,
    grad_norm_metrics,
    moments,
    param_table,
    run_metrics,
    suspects,
)
from distmon.record.tasks import task_metrics
from distmon.record.telemetry import run_summary, without_waiting
from distmon.reduce.buffers import Reduced
from distmon.reduce.findings import Desync, NonFinite, has_nonfinite
from distmon.reduce.process_group import minority
from distmon.reduce.rank_slots import WIRE_FIELDS
from distmon.sampling.plan import REPLICA_CLASSES


@dataclass(frozen=True)
class Observation:
    """Reduced numbers of one observation, equal on all ranks, with nothing derived yet."""

    step: int
    reduced: Reduced
    losses: Mapping[int, float]
    """By step since the last observation, mean over ranks."""
    nbytes: int
    """Bytes that one rank sent."""
    interval: int
    """Steps from one observation to the next, when this one was made."""
    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    tasks: Mapping[str, float] | None = None

    @property
    def has_nonfinite(self) -> bool:
        """Whether anything is NaN or Inf that should not be."""
        sampled = self.reduced.sample_has_nonfinite
        return has_nonfinite(self.nonfinite, self.losses.values(), sampled)


class RecordBuilder:
    """Derives one record after another, and keeps the state between them."""

    def __init__(
        self,
        config: MonitorConfig,
        sampling: Sampling,
        blocks: Blocks,
        world_size: int,
        collectives: int,
        hosts: tuple[str, ...] = (),
        utilization: Utilization | None = None,
    ) -> None:
        """`collectives` that ranks enter in one observation; `utilization` gives the MFU."""
        self._config = config
        self._sampling = sampling
        self._blocks = blocks
        self._world_size = world_size
        self._collectives = collectives
        self._hosts = hosts
        self.ema = LossEma(config.ema_decay)
        self.gain = GainWindow(config.flow.window, blocks.longest)
        self.evaluations = EvaluationHistory()
        self._checksums: Column | None = None
        self._utilization = utilization or Utilization()
        self.read_in_full: list[int] = []
        """Parameters whose gradient is read in full at the next observation."""

    def build(self, found: Observation) -> Record:
        """Return the record of an observation; the same on every rank."""
        reduced = replace(found.reduced, ranks=without_waiting(found.reduced.ranks))
        estimates = moments(reduced, self._sampling)
        table = param_table(reduced, estimates, self._sampling, self._config.eps)
        self.read_in_full = suspects(table, self._sampling)
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
        rates = reduced.ranks["lr"][reduced.ranks["failed"] == 0]
        if not np.isnan(rates).all():
            metrics["train/lr"] = float(rates[~np.isnan(rates)][0])
        evaluations = self.evaluations.receive(reduced.ranks, self.ema.value)
        if evaluations:
            metrics |= evaluation_metrics(evaluations[-1])
        tasks = dict(found.tasks or {})
        metrics |= task_metrics(tasks)
        applied = bool(reduced.sums[:, SUM["u_count"]].any())
        gain = None
        # Without a rank it would be the gain of a part of the batch; a skipped step is noise.
        if applied and not reduced.ranks["failed"].any():
            gain = gain_table(self._blocks.names, reduced.blocks)
        metrics |= self.gain.metrics(gain)
        metrics |= grad_norm_metrics(metrics, reduced.ranks)
        metrics |= self._performance(found, reduced)
        if self._stepped_elsewhere(found, reduced):
            metrics["debug/stepped_elsewhere"] = 1.0
        return Record(
            step=found.step,
            time=float(reduced.ranks["time"][0]),
            world_size=self._world_size,
            metrics=metrics,
            params=table,
            ranks=_rank_telemetry(reduced),
            hosts=self._hosts,
            mfu_source=self._utilization.source,
            losses=losses,
            loss_ema=averages,
            applied=applied,
            gradient_gain=gain,
            evaluations=evaluations,
            tasks=tasks,
            nonfinite=found.nonfinite,
            desync=found.desync,
            faults=_faults(reduced, found.step),
        )

    def partial_record(self, step: int, fields: Mapping[str, float], lr: float | None) -> Record:
        """Return a record of what the trainer reported after the last observation.

        `fields` are slot fields of this rank.
        """
        slots = {name: np.array([fields.get(name, 0.0)]) for name in WIRE_FIELDS}
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

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "loss_ema": self.ema.value,
            "gain": [*self.gain.values],
            "evaluations": self.evaluations.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        loss_ema = state["loss_ema"]
        self.ema.value = None if loss_ema is None else float(loss_ema)
        self.gain.restore(state["gain"])
        if "evaluations" in state:
            self.evaluations.load_state_dict(state["evaluations"])

    def _stepped_elsewhere(self, found: Observation, reduced: Reduced) -> bool:
        """Whether weights changed since the last record although no attached optimizer stepped."""
        now = np.stack([reduced.ranks[f"checksum{i}"] for i in range(REPLICA_CLASSES)])
        before, self._checksums = self._checksums, now
        all_skipped = reduced.ranks["skipped_steps"].min() >= len(found.losses) > 0
        return before is not None and bool(all_skipped) and bool((now != before).any())

    def _performance(self, found: Observation, reduced: Reduced) -> dict[str, float]:
        metrics = {
            "performance/monitor_bytes": float(found.nbytes),
            "performance/monitor_collectives": float(self._collectives),
            "performance/interval": float(found.interval),
            **run_summary(reduced.ranks),
        }
        return metrics | self._utilization.metrics(metrics, self._world_size)


def _rank_telemetry(reduced: Reduced) -> dict[str, Column]:
    """Return the public fields of the rank slots; a field without a value on any rank is absent."""
    columns = ((metric.name, reduced.ranks[metric.name]) for metric in RANK_METRICS)
    return {name: column for name, column in columns if not np.isnan(column).all()}


def _faults(reduced: Reduced, step: int) -> tuple[str, ...]:
    faults = [f"rank {r} failed to observe step {step}: {t}" for r, t in reduced.errors.items()]
    for what, words in (
        ("step", "counts steps differently"),
        ("plan_hash", "samples other elements"),
        ("task_key", "measured other tasks, or on other parameters"),
    ):
        others = minority(reduced.ranks[what].tolist())
        faults += [f"rank {r} {words}" for r in others]
    return tuple(faults)
