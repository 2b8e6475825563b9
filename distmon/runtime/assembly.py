"""Put the parts of a monitor together, once all ranks know what the model is."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from distmon import native
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.gradient_gain import BackwardNorms, Blocks
from distmon.collect.ownership import Ownership, adaptive
from distmon.collect.signals import StepSignals
from distmon.collect.telemetry.hardware import HardwareSampler, opener_for
from distmon.collect.telemetry.mfu_setup import set_up_mfu
from distmon.collect.telemetry.rank_telemetry import FROM_DEVICE, RankTelemetry
from distmon.config import MonitorConfig
from distmon.errors import RunFolderError
from distmon.layout import Shard
from distmon.layout.shard import Everything
from distmon.record.builder import RecordBuilder
from distmon.reduce.process_group import Ranks
from distmon.rules import RuleEngine
from distmon.rules.engine import ActiveRule
from distmon.rules.user_code import UserCode
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_names import new_run_path
from distmon.runtime.actions import AlertActions
from distmon.runtime.budget import Budget
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observation_cycle import ObservationCycle
from distmon.runtime.observer import Observer
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.source import Optimizers, Options, Source
from distmon.runtime.worker import DerivedOnRequest, Evaluation, EvaluationWorker
from distmon.sampling.plan import SamplePlan
from distmon.sampling.reading import Reading
from distmon.sinks import Delivery, build_factories
from distmon.sinks.console import announce
from distmon.sinks.run_output import RunOutput

log = logging.getLogger("distmon")


@dataclass(frozen=True)
class Blueprint:
    """What all ranks know of the model after the exchange, and this rank's part of it."""

    settings: MonitorConfig
    ranks: Ranks
    shards: list[Shard]
    """One for every parameter of the whole model, empty where this rank holds nothing."""
    rules: Sequence[ActiveRule]
    blocks: Blocks
    modules: Mapping[str, nn.Module]
    """This rank's modules by name, the blocks among them."""
    in_stages: bool
    """Ranks hold different modules."""
    hosts: tuple[str, ...]
    reading: Reading


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


def assemble(blueprint: Blueprint, source: Source, options: Options, undo: ExitStack) -> Parts:
    """Build the parts. What holds a thread or a file is registered in `undo` as it is opened."""
    settings, ranks, shards = blueprint.settings, blueprint.ranks, blueprint.shards
    ownership = Ownership(shards, _as_list(source.optimizers), source.param_groups)
    finite_watch = FiniteWatch(
        shards,
        has_optimizers=bool(ownership.optimizers),
        skips_are_evidence=source.skips_are_evidence,
    )
    observer = Observer(
        shards, ownership, ranks, settings, blueprint.reading, _gain(blueprint, source.device)
    )
    device = observer.plan.device
    signals = _signals(source, observer, ownership, shards, settings)
    telemetry = RankTelemetry(device, _hardware(device, settings), signals=signals)
    undo.callback(telemetry.close)
    set_up_mfu(telemetry.utilization, settings.mfu, source.models, shards[0], ranks.rank == 0)
    builder = RecordBuilder(
        settings,
        observer.sampling,
        blueprint.blocks,
        ranks.size,
        collectives=2 if ranks.together else 0,
        hosts=blueprint.hosts,
        mfu_source=lambda: telemetry.utilization.source,
    )
    schedule = StepSchedule(settings.interval, settings.task_interval, settings.first_observation)
    faults = FaultLog(ranks.rank)
    user_code = UserCode(settings.callback_timeout_s)
    undo.callback(user_code.close)
    actions = AlertActions(settings.actions, options.callbacks, faults, user_code)
    rules = RuleEngine(blueprint.rules, user_code)
    hashed = settings.check_records
    worker: Evaluation = DerivedOnRequest(builder, rules, hashed)
    if ranks.rank == 0:
        output = _open_output(blueprint, observer.plan, options)
        undo.callback(output.close)
        worker = EvaluationWorker(builder, rules, output, actions.alerted, hashed)
    cost = SelfCost(Budget(settings.budget, settings.interval, settings.budget_after_s))
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
    )


def _signals(
    source: Source,
    observer: Observer,
    ownership: Ownership,
    shards: Sequence[Shard],
    settings: MonitorConfig,
) -> StepSignals:
    rows = {id(p): i for i, shard in enumerate(shards) for p in shard.parameters}
    groups = [
        [p for group in optimizer.param_groups for p in group["params"] if id(p) in rows]
        for optimizer in ownership.optimizers
    ]
    return StepSignals(
        source.models,
        groups,
        rows,
        [i for i, shard in enumerate(shards) if len(shard.global_shape) > 1],
        lambda: (observer.plan, observer.row_sums),
        observer.plan.device,
        hashes=settings.batch_hash,
        adaptive=adaptive(ownership.optimizers),
        holds_all=all(isinstance(shard.region, Everything) for shard in shards),
    )


def _gain(blueprint: Blueprint, device: torch.device) -> BackwardNorms:
    # The native module reads memory of the host only.
    wanted = device.type == "cpu" and blueprint.settings.backend != "torch"
    module = native.status().module if wanted else None
    return BackwardNorms(blueprint.blocks, blueprint.modules, device, blueprint.in_stages, module)


def _open_output(blueprint: Blueprint, plan: SamplePlan, options: Options) -> RunOutput:
    settings = blueprint.settings
    parameters = [
        {
            "name": shard.name,
            "shape": list(shard.global_shape),
            "dtype": str(shard.dtype).removeprefix("torch."),
            "requires_grad": shard.requires_grad(),
            "sampled": sample.count,
        }
        for shard, sample in zip(blueprint.shards, plan.samples, strict=True)
    ]
    described = {
        "config": settings.model_dump(mode="json"),
        "parameters": parameters,
        "reading": plan.describe(),
    }
    folder = _open_folder(settings, described)
    factories = build_factories(settings, folder, options.console)
    if "console" in settings.sinks:
        announce(options.console or Console(), folder, settings)
    return RunOutput(folder, Delivery(factories, settings.queue_size), blueprint.ranks.size)


def _open_folder(settings: MonitorConfig, described: Mapping[str, Any]) -> RunFolder:
    """Open the run folder; where it is unusable, a folder among the temporary files instead.

    A job that restarts must not end because its folder has become unusable, unless `strict`.
    """
    try:
        return RunFolder.open(settings.run_dir or new_run_path(), **described)
    except RunFolderError as error:
        if settings.strict:
            raise
        instead = tempfile.mkdtemp(prefix="distmon-")
        log.error("distmon: %s; writing this run to %s instead", error, instead)
        return RunFolder.open(instead, **described)


def _hardware(device: torch.device, settings: MonitorConfig) -> HardwareSampler | None:
    opener = opener_for(device, os.environ, fields=(*FROM_DEVICE, "throttle_reasons"))
    return None if opener is None else HardwareSampler(opener, settings.hardware_period_s)


def _as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    if isinstance(optimizers, Iterable):
        return [*optimizers]
    return [optimizers]  # what is no optimizer at all is named by Ownership
