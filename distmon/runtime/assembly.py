"""Put the parts of a monitor together, once all ranks know what the model is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from distmon import native
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.gradient_gain import BackwardNorms
from distmon.collect.inside.inside import Inside
from distmon.collect.ownership import Ownership, adaptive, decay_per_step
from distmon.collect.signals import StepSignals
from distmon.collect.telemetry.hardware import HardwareSampler, opener_for
from distmon.collect.telemetry.mfu_setup import set_up_mfu
from distmon.collect.telemetry.rank_telemetry import FROM_DEVICE, RankTelemetry
from distmon.config import MonitorConfig
from distmon.layout import Shard
from distmon.layout.shard import Everything
from distmon.record.builder import BuilderInputs, RecordBuilder
from distmon.rules import RuleEngine
from distmon.rules.user_code import UserCode
from distmon.runtime.actions import AlertActions
from distmon.runtime.blueprint import Blueprint
from distmon.runtime.budget import Budget
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observation_cycle import ObservationCycle
from distmon.runtime.observer import Observer
from distmon.runtime.rank0 import Rank0, StartingWriter, describe_run, open_evaluation
from distmon.runtime.row_measurement import RowMeasurement
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.source import Optimizers, Options, Source
from distmon.runtime.worker import DerivedOnRequest, Evaluation
from distmon.runtime.writer_cost import WriterCost
from distmon.sinks.gaps import LastObservation


@dataclass(frozen=True)
class Parts:
    """The parts of a monitor that has no hooks yet."""

    schedule: StepSchedule
    cycle: ObservationCycle
    finite_watch: FiniteWatch
    telemetry: RankTelemetry
    cost: SelfCost
    actions: AlertActions
    faults: FaultLog
    native: native.NativeModule | None


def assemble(blueprint: Blueprint, source: Source, options: Options, undo: ExitStack) -> Parts:
    """Build the parts. What holds a thread or a file is registered in `undo` as it is opened."""
    settings, ranks, shards = blueprint.settings, blueprint.ranks, blueprint.shards
    with_writer = ranks.rank == 0 and settings.writer == "process"
    starting = StartingWriter(settings, undo) if with_writer else None
    ownership = Ownership(shards, _as_list(source.optimizers), source.param_groups)
    rows = RowMeasurement(
        shards, ownership, settings, blueprint.reading, blueprint.copies, ranks.rank
    )
    observer = _observer(blueprint, rows, source.device)
    finite_watch = FiniteWatch(
        rows.count_nonfinite,
        has_optimizers=bool(ownership.optimizers),
        skips_are_evidence=source.skips_are_evidence,
    )
    device = rows.device
    signals = _signals(source, observer, ownership, shards, settings)
    telemetry = RankTelemetry(device, _hardware(device, settings), signals=signals)
    undo.callback(telemetry.close)
    set_up_mfu(telemetry.utilization, settings.mfu, source.models, shards[0], ranks.rank == 0)
    builder = RecordBuilder(
        _builder_inputs(blueprint, rows), mfu_source=lambda: telemetry.utilization.source
    )
    schedule = StepSchedule(settings.interval, settings.task_interval, settings.first_observation)
    faults = FaultLog(ranks.rank)
    user_code = UserCode(settings.callback_timeout_s)
    undo.callback(user_code.close)
    actions = AlertActions(settings.actions, options.callbacks, faults, user_code)
    worker: Evaluation
    if ranks.rank == 0:
        rank0 = Rank0(
            settings=settings,
            builder=builder,
            rules=blueprint.rules,
            user_code=user_code,
            on_alerts=actions.alerted,
            console=options.console,
            observation_bytes=observer.collective_bytes,
            described=describe_run(settings, shards, rows.plan),
        )
        worker = open_evaluation(rank0, starting, undo)
        undo.callback(worker.close, LastObservation(0, 0))
    else:
        rules = RuleEngine(blueprint.rules, user_code)
        worker = DerivedOnRequest(builder, rules, settings.check_records)
    cost = SelfCost(
        Budget(settings.budget, settings.interval, settings.budget_after_s),
        hook_seconds=lambda: observer.hook_seconds + telemetry.hook_seconds,
        take_beside=_writer_cost(worker, blueprint, device).take,
    )
    cycle = ObservationCycle(
        observer=observer,
        worker=worker,
        schedule=schedule,
        finite_watch=finite_watch,
        telemetry=telemetry,
        cost=cost,
        actions=actions,
        faults=faults,
    )
    return Parts(
        schedule=schedule,
        cycle=cycle,
        finite_watch=finite_watch,
        telemetry=telemetry,
        cost=cost,
        actions=actions,
        faults=faults,
        native=_native(settings, device),
    )


def _writer_cost(worker: Evaluation, blueprint: Blueprint, device: torch.device) -> WriterCost:
    hosts, rank = blueprint.hosts, blueprint.ranks.rank
    return WriterCost(worker.cpu_seconds_elsewhere, device, hosts.count(hosts[rank]))


def _observer(blueprint: Blueprint, rows: RowMeasurement, device: torch.device) -> Observer:
    settings, ranks = blueprint.settings, blueprint.ranks
    module = _native(settings, device)
    gain = BackwardNorms(blueprint.blocks, blueprint.modules, device, blueprint.in_stages, module)
    inside = Inside(
        blueprint.catalog,
        blueprint.watched,
        device,
        settings.inside.attention_sample,
        logging.INFO if ranks.rank else logging.WARNING,
    )
    return Observer(rows, ranks, settings, gain, inside)


def _builder_inputs(blueprint: Blueprint, rows: RowMeasurement) -> BuilderInputs:
    ranks = blueprint.ranks
    return BuilderInputs(
        config=blueprint.settings,
        sampling=rows.sampling,
        blocks=blueprint.blocks,
        world_size=ranks.size,
        collectives=2 if ranks.together else 0,
        hosts=blueprint.hosts,
        catalog=blueprint.catalog,
    )


def _signals(
    source: Source,
    observer: Observer,
    ownership: Ownership,
    shards: Sequence[Shard],
    settings: MonitorConfig,
) -> StepSignals:
    rows = {id(s.parameter): i for i, s in enumerate(shards) if s.parameter is not None}
    groups = [
        [p for group in optimizer.param_groups for p in group["params"] if id(p) in rows]
        for optimizer in ownership.optimizers
    ]
    if any(shard.copied for shard in shards):  # their numbers are computed in float64
        groups = []
    return StepSignals(
        source.models,
        groups,
        rows,
        [i for i, shard in enumerate(shards) if len(shard.global_shape) > 1],
        lambda: (observer.rows.plan, observer.row_sums),
        observer.rows.device,
        hashes=settings.batch_hash,
        adaptive=adaptive(ownership.optimizers),
        holds_all=all(isinstance(shard.region, Everything) for shard in shards),
        native=_native(settings, observer.rows.device),
        decay_per_step=lambda: decay_per_step(ownership.optimizers),
    )


def _native(settings: MonitorConfig, device: torch.device) -> native.NativeModule | None:
    """Return the native module where it is used: it reads memory of the host only."""
    wanted = device.type == "cpu" and settings.backend != "torch"
    return native.status().module if wanted else None


def _hardware(device: torch.device, settings: MonitorConfig) -> HardwareSampler | None:
    opener = opener_for(device, os.environ, fields=(*FROM_DEVICE, "throttle_reasons"))
    return None if opener is None else HardwareSampler(opener, settings.hardware_period_s)


def _as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    if isinstance(optimizers, Iterable):
        return [*optimizers]
    return [optimizers]  # what is no optimizer at all is named by Ownership
