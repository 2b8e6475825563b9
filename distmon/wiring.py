"""The one place where the parts are put together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from distmon import native
from distmon.actions import AlertCall, Callbacks, check_patterns
from distmon.budget import Budget
from distmon.catalogue import Holding, complete, describe, exchange, merge, merge_modules
from distmon.config import MonitorConfig, load_config
from distmon.errors import DistmonError, LayoutError
from distmon.flow import BackwardNorms, Blocks, candidates, choose
from distmon.layout import NamedModule, Shard
from distmon.monitor import Monitor
from distmon.observer import AGREED, Observer
from distmon.ownership import Ownership
from distmon.recording import Recorder
from distmon.reduce import Ranks
from distmon.reporter import Reporter
from distmon.rules import BUILTIN, RuleEngine, configure, with_users_rules
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule
from distmon.run_folder import RunFolder
from distmon.sampling import SamplePlan
from distmon.signals import SignalWatch
from distmon.silent import SilentMonitor
from distmon.sinks import Delivery, build_factories
from distmon.telemetry.hardware import HardwareSampler, opener_for
from distmon.telemetry.mfu_setup import set_up as set_up_mfu
from distmon.telemetry.rank_row import RankTelemetry

# On an accelerator the copy to the host is long done two steps after it was queued.
PICK_UP_AFTER = 2


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Config = MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def watch(
    find_shards: Callable[[MonitorConfig], list[Shard]],
    device: torch.device,
    optimizer: Optimizers,
    config: Config = None,
    *,
    find_modules: Callable[[], Sequence[NamedModule]] | None = None,
    hooks: bool = True,
    console: Console | None = None,
    groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
    own_rules: Sequence[Rule] = (),
    skips_are_evidence: bool = False,
    on_alert: AlertCall | None = None,
    on_checkpoint: AlertCall | None = None,
    models: Sequence[nn.Module] = (),
    **overrides: Any,
) -> Monitor:
    """Put a monitor together: what `attach` does for every way to train.

    `find_shards` is called with the valid settings and lists what this rank holds; `device` is
    where. `find_modules` lists the modules, some of which may be blocks of the backward pass;
    without it none is watched. `groups` gives the param groups of all optimizers, where those of
    `optimizer` are not what the user set up. `skips_are_evidence`: no loss is scaled, so a step is
    left out only when something is wrong.
    """
    # Whatever is wrong on one rank, all of them meet in `agree` and stop together.
    problem: Exception | None = None
    settings = MonitorConfig()
    try:
        settings = load_config(config, overrides)
    except DistmonError as error:
        problem = error
    if not settings.enabled:
        return SilentMonitor()
    ranks = Ranks(settings.timeout_s, device)
    shards: list[Shard] = []
    modules: Sequence[NamedModule] = ()
    globs: tuple[str, ...] = ()
    mine = Holding()
    flow = BackwardNorms(Blocks(), {}, device)
    monitor: Monitor | None = None
    agreement = dict.fromkeys(AGREED, 0)
    if problem is None:
        try:
            shards = find_shards(settings)
            _check_devices(shards)
            if find_modules is not None and settings.flow.enabled:
                modules, globs = find_modules(), settings.flow.blocks
            mine = Holding(describe(shards), candidates(modules, globs))
        except Exception as error:
            problem = error
    holdings = exchange(ranks, mine, device)
    hosts = ranks.hosts(device)
    if problem is None:
        try:
            table = merge({rank: held.parameters for rank, held in holdings.items()})
            shards = complete(table, shards, device)
            blocks = choose(
                merge_modules([held.modules for held in holdings.values()]),
                {entry.name: math.prod(entry.shape) for entry in table},
                globs,
            )
            here = {each.name: each.called for each in modules}
            # What it can read is on a CPU: elsewhere every gradient would ask it in vain.
            wanted = device.type == "cpu" and settings.backend != "torch"
            fast = native.status().module if wanted else None
            flow = BackwardNorms(blocks, here, device, len(holdings) > 1, fast)
            ownership = Ownership(shards, _as_list(optimizer), groups)
            signals = SignalWatch(shards, skips_are_evidence)
            rules = with_users_rules(BUILTIN, settings.rules, own_rules)
            active = configure(rules, settings.rules)
            check_patterns(settings.actions, [rule.name for rule in rules])
            monitor, agreement = _build(
                shards,
                ownership,
                signals,
                active,
                settings,
                ranks,
                flow,
                console,
                Callbacks(on_alert, on_checkpoint),
                hosts,
            )
            set_up_mfu(
                monitor.utilization, settings.mfu, models, device, shards[0].dtype, ranks.rank == 0
            )
        except Exception as error:
            problem = error
    try:
        ranks.agree(agreement, problem is None, device)
    except DistmonError:
        if monitor is not None:
            monitor.close()
        if problem is not None:
            raise problem from None
        raise
    assert monitor is not None
    flow.install()
    monitor.install_forward_marks(models)
    if hooks:
        monitor.install_hooks()
    return monitor


def _build(
    shards: Sequence[Shard],
    ownership: Ownership,
    signals: SignalWatch,
    active: Sequence[ActiveRule],
    settings: MonitorConfig,
    ranks: Ranks,
    flow: BackwardNorms,
    console: Console | None,
    callbacks: Callbacks,
    hosts: tuple[str, ...],
) -> tuple[Monitor, dict[str, int]]:
    """Everything that needs no other rank; also hashes of what must be equal on all of them."""
    frozen_ratio = next((a.limits["ratio"] for a in active if a.rule.name == "frozen"), 1e-12)
    observer = Observer(shards, ownership, ranks, settings, flow)
    recorder = Recorder(
        settings,
        observer.sampling,
        flow.blocks,
        frozen_ratio,
        ranks.size,
        collectives=2 if ranks.together else 0,
        hosts=hosts,
    )
    device = observer.plan.device
    reporter = None
    if ranks.rank == 0:
        reporter = _reporter(settings, shards, observer.plan, ranks, console)
    monitor = Monitor(
        interval=settings.interval,
        observer=observer,
        recorder=recorder,
        watch=signals,
        rules=RuleEngine(active),
        ranks=ranks,
        optimizers=ownership.optimizers,
        reporter=reporter,
        pick_up_after=0 if device.type == "cpu" else PICK_UP_AFTER,
        task_interval=settings.task_interval,
        actions=settings.actions,
        callbacks=callbacks,
        telemetry=RankTelemetry(device, _hardware(device, settings)),
        budget=Budget(settings.budget, settings.interval, settings.budget_after_s),
    )
    return monitor, observer.agreement


def _reporter(
    settings: MonitorConfig,
    shards: Sequence[Shard],
    plan: SamplePlan,
    ranks: Ranks,
    console: Console | None,
) -> Reporter:
    parameters = [
        {
            "name": shard.name,
            "shape": list(shard.global_shape),
            "dtype": str(shard.dtype).removeprefix("torch."),
            "requires_grad": shard.requires_grad(),
            "sampled": sample.count,
        }
        for shard, sample in zip(shards, plan.samples, strict=True)
    ]
    folder = RunFolder.open(
        settings.run_dir, config=settings.model_dump(mode="json"), parameters=parameters
    )
    delivery = Delivery(build_factories(settings, folder, console), settings.queue_size)
    return Reporter(folder, delivery, ranks.size)


def _hardware(device: torch.device, settings: MonitorConfig) -> HardwareSampler | None:
    opener = opener_for(device, os.environ)
    return None if opener is None else HardwareSampler(opener, settings.hardware_period_s)


def _check_devices(shards: Sequence[Shard]) -> None:
    for shard in shards:
        if shard.weight().is_meta:
            raise LayoutError(
                f"parameter {shard.name} is on the meta device: attach after it has storage"
            )
    devices = {shard.weight().device for shard in shards}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise LayoutError(
            f"the parameters of one process lie on {len(devices)} devices ({names}); "
            "attach one monitor per device with `include`"
        )


def _as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Iterable):
        return [*optimizer]
    return [optimizer]  # what is no optimizer at all is named by Ownership
