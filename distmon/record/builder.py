"""Derive the record of an observation from its reduced numbers; needs no other rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from distmon.collect.gradient_gain.block_table import Blocks
from distmon.collect.inside.catalog import Catalog
from distmon.config import MonitorConfig
from distmon.metrics import RANK_METRICS
from distmon.record.evaluations import EvaluationHistory, evaluation_metrics
from distmon.record.gradient_gain import GainWindow, gain_table
from distmon.record.inside import InsideWindow, inside_metrics
from distmon.record.loss_ema import LossEma
from distmon.record.observation import Observation
from distmon.record.record import (
    Column,
    Evaluation,
    GainTable,
    InsideTable,
    ParamTable,
    Record,
)
from distmon.record.sample_tables import Sampling
from distmon.record.statistics import grad_norm_metrics, moments, param_table, run_metrics, suspects
from distmon.record.tasks import task_metrics
from distmon.record.telemetry import mfu_metrics, run_summary, without_waiting
from distmon.reduce.majority import minority
from distmon.reduce.rank_slots import WIRE_FIELDS
from distmon.reduce.reduced import Reduced
from distmon.sampling.sample import REPLICA_CLASSES

DIFFERENT: Final = "different record"
"""What is said of a rank whose record is not that of the others."""


@dataclass(frozen=True)
class Progression:
    """What an observation adds to the state between records, so that it can be derived later."""

    averages: Mapping[int, float]
    """Moving average of the loss after each step since the last observation."""
    evaluations: tuple[Evaluation, ...]
    gain: GainTable | None
    gain_metrics: Mapping[str, float]
    inside: Mapping[str, InsideTable]
    stepped_elsewhere: bool
    """Weights changed since the last record although no attached optimizer stepped."""


@dataclass(frozen=True)
class BuilderInputs:
    """What records are derived with; all ranks agreed on it at attach."""

    config: MonitorConfig
    sampling: Sampling
    blocks: Blocks
    world_size: int
    collectives: int
    """That ranks enter in one observation."""
    hosts: tuple[str, ...] = ()
    catalog: Catalog = field(default_factory=Catalog)
    """What is watched inside the model."""


class RecordBuilder:
    """Derives one record after another, and keeps the state between them.

    Everything in a record comes from reduced numbers or was agreed on at attach, so every rank
    derives the same one. `advance` is cheap and follows every observation on every rank; `derive`
    is the work, which other ranks than 0 do on request only.
    """

    def __init__(self, inputs: BuilderInputs, mfu_source: Callable[[], str] = str) -> None:
        """`mfu_source` describes what the MFU was computed from."""
        config, blocks = inputs.config, inputs.blocks
        self.inputs = inputs
        self.mfu_source = mfu_source
        self._config = config
        self._sampling = inputs.sampling
        self._blocks = blocks
        self.world_size = inputs.world_size
        self.ema = LossEma(config.ema_decay)
        self.gain = GainWindow(config.flow.window, blocks.longest)
        self.inside = InsideWindow(inputs.catalog, config.inside.window)
        self.evaluations = EvaluationHistory()
        self._checksums: Column | None = None
        self.read_in_full: Sequence[int] = ()
        """Parameters whose gradient this rank reads in full at the next observation. Where ranks
        differ because one of them has not derived the last record, nothing follows from it."""

    def build(self, found: Observation) -> Record:
        """Return the record of an observation; the same on every rank."""
        return self.derive(found, self.advance(found))

    def advance(self, found: Observation) -> Progression:
        """Take an observation into the state between records."""
        averages = self._average(found.losses)
        gain = None
        # Without a rank it would be the gain of a part of the batch; a skipped step is noise.
        if found.applied and not found.fields["failed"].any():
            gain = gain_table(self._blocks.names, found.blocks)
        return Progression(
            averages=averages,
            evaluations=self.evaluations.receive(found.fields, self.ema.value),
            gain=gain,
            gain_metrics=self.gain.metrics(gain),
            inside=self.inside.tables(found.inside, found.inside_maxima, found.fields["failed"]),
            stepped_elsewhere=self._stepped_elsewhere(found),
        )

    def derive(self, found: Observation, state: Progression) -> Record:
        """Return the record of an observation, given what `advance` returned for it."""
        reduced = replace(found.read(), ranks=without_waiting(found.fields))
        estimates = moments(reduced, self._sampling)
        table = param_table(reduced, estimates, self._sampling, self._config.eps)
        self.read_in_full = suspects(table, self._sampling)
        metrics = run_metrics(reduced, estimates, table, self._sampling, self._config.topk)
        losses, averages = dict(found.losses), dict(state.averages)
        metrics |= _last_losses(losses, averages)
        if self._config.loss.expected_to_fall is not None:
            metrics["train/loss_expected_to_fall"] = float(self._config.loss.expected_to_fall)
        rates = reduced.ranks["lr"][reduced.ranks["failed"] == 0]
        if not np.isnan(rates).all():
            metrics["train/lr"] = float(rates[~np.isnan(rates)][0])
        if state.evaluations:
            metrics |= evaluation_metrics(state.evaluations[-1])
        tasks = dict(found.tasks or {})
        metrics |= task_metrics(tasks)
        metrics |= state.gain_metrics
        metrics |= inside_metrics(state.inside)
        metrics |= grad_norm_metrics(metrics, reduced.ranks)
        metrics |= self._performance(found, reduced)
        if state.stepped_elsewhere:
            metrics["debug/stepped_elsewhere"] = 1.0
        return Record(
            step=found.step,
            time=float(reduced.ranks["time"][0]),
            world_size=self.world_size,
            metrics=metrics,
            params=table,
            ranks=_rank_telemetry(reduced),
            hosts=self.inputs.hosts,
            mfu_source=self.mfu_source(),
            losses=losses,
            loss_ema=averages,
            applied=found.applied,
            gradient_gain=state.gain,
            inside=state.inside,
            evaluations=state.evaluations,
            tasks=tasks,
            nonfinite=found.nonfinite,
            desync=found.desync,
            observation=found.number,
            faults=_faults(reduced, found.step),
        )

    def _average(self, losses: Mapping[int, float]) -> dict[int, float]:
        """Return the moving average of the loss after each of these steps."""
        averages = {at: self.ema.update(loss) for at, loss in losses.items()}
        return {at: value for at, value in averages.items() if value is not None}

    def partial_record(
        self,
        step: int,
        fields: Mapping[str, float],
        lr: float | None,
        losses: Mapping[int, float],
        faults: tuple[str, ...] = (),
    ) -> Record:
        """Return a record of what the trainer reported after the last observation.

        `fields` are slot fields of this rank, `losses` its own.
        """
        slots = {name: np.array([fields.get(name, 0.0)]) for name in WIRE_FIELDS}
        averages = self._average(losses)
        evaluations = self.evaluations.receive(slots, self.ema.value)
        return Record(
            step=step,
            time=time.time(),
            world_size=self.world_size,
            metrics={
                **_last_losses(losses, averages),
                **(evaluation_metrics(evaluations[-1]) if evaluations else {}),
                **({} if lr is None else {"train/lr": lr}),
            },
            params=ParamTable.empty(),
            ranks={},
            losses=losses,
            loss_ema=averages,
            applied=False,
            evaluations=evaluations,
            partial=True,
            faults=faults,
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

    def _stepped_elsewhere(self, found: Observation) -> bool:
        fields = found.fields
        now = np.stack([fields[f"checksum{i}"] for i in range(REPLICA_CLASSES)])
        before, self._checksums = self._checksums, now
        all_skipped = fields["skipped_steps"].min() >= len(found.losses) > 0
        return before is not None and bool(all_skipped) and bool((now != before).any())

    def _performance(self, found: Observation, reduced: Reduced) -> dict[str, float]:
        metrics = {
            "performance/monitor_bytes": float(found.nbytes),
            "performance/monitor_collectives": float(self.inputs.collectives),
            "performance/interval": float(found.interval),
            **run_summary(reduced.ranks),
        }
        # FLOPs and peak as rank 0 has them: they may be counted or measured, on each rank anew.
        flops, peak = (float(reduced.ranks[what][0]) for what in ("flops_per_token", "peak_flops"))
        return metrics | mfu_metrics(flops, peak, metrics, self.world_size)


def _last_losses(losses: Mapping[int, float], averages: Mapping[int, float]) -> dict[str, float]:
    """Return the metrics of the newest loss and of its moving average."""
    metrics = {}
    for tag, series in (("train/step_loss", losses), ("train/step_loss_ema", averages)):
        if series:
            metrics[tag] = [*series.values()][-1]
    return metrics


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
    return (*faults, *_different_records(reduced.ranks))


def _different_records(ranks: Mapping[str, Column]) -> list[str]:
    """Name the ranks that derived another record than the others, with `check_records`."""
    steps, hashes = ranks["record_step"], ranks["record_hash"]
    if steps.min() <= 0 or steps.min() != steps.max():
        return []
    return [f"rank {r} derived a {DIFFERENT} of step {steps[r]:.0f}" for r in minority([*hashes])]
