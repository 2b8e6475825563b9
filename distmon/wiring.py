"""`attach`: the one place where the parts are put together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from distmon.config import MonitorConfig, load_config
from distmon.errors import DistmonError, LayoutError
from distmon.layout import Shard, capture
from distmon.monitor import Monitor
from distmon.observer import Observer
from distmon.ownership import Ownership
from distmon.reduce import Ranks
from distmon.reporter import Reporter
from distmon.rules import BUILTIN, RuleEngine, configure
from distmon.run_folder import RunFolder
from distmon.sampling import SamplePlan
from distmon.signals import SignalWatch
from distmon.sinks import Delivery, build_factories

# On an accelerator the copy to the host is long done two steps after it was queued.
PICK_UP_AFTER = 2


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
    config: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    hooks: bool = True,
    console: Console | None = None,
    **overrides: Any,
) -> Monitor:
    """Watch `model` while `optimizer` (or several) trains it.

    Call it on every rank, after wrapping the model and before its first forward. `config` is a
    mapping, a YAML or JSON file, or a `MonitorConfig`; keyword arguments override its keys. With
    `hooks=False` the trainer calls `before_step()` and `after_step()` itself. `console` is where
    the console sink prints; pass that of your progress bar. A mistake is a `DistmonError`.
    """
    settings = load_config(config, overrides)
    active = configure(BUILTIN, settings.rules)
    frozen_ratio = next((a.limits["ratio"] for a in active if a.rule.name == "frozen"), 1e-12)
    shards = capture(model, settings.include, settings.exclude)
    _check_devices(shards)
    optimizers = _as_list(optimizer)
    ownership = Ownership(shards, optimizers)
    ranks = Ranks(settings.timeout_s, settings.enabled)
    observer = Observer(shards, ownership, ranks, settings, frozen_ratio)
    reporter: Reporter | None = None
    problem: DistmonError | None = None
    if ranks.rank == 0 and settings.enabled:
        try:
            reporter = _reporter(settings, shards, observer.plan, ranks, console)
        except DistmonError as error:
            problem = error
    try:
        ranks.agree(observer.plan.plan_hash, problem is None, observer.plan.device)
    finally:
        if problem is not None:
            raise problem
    monitor = Monitor(
        interval=settings.interval,
        observer=observer,
        watch=SignalWatch(shards),
        rules=RuleEngine(active),
        ranks=ranks,
        optimizers=optimizers,
        reporter=reporter,
        pick_up_after=0 if observer.plan.device.type == "cpu" else PICK_UP_AFTER,
        enabled=settings.enabled,
    )
    if hooks and settings.enabled:
        monitor.install_hooks()
    return monitor


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
            "sampled": len(sample.indices),
        }
        for shard, sample in zip(shards, plan.samples, strict=True)
    ]
    folder = RunFolder.open(
        settings.run_dir, config=settings.model_dump(mode="json"), parameters=parameters
    )
    delivery = Delivery(build_factories(settings, folder, console), settings.queue_size)
    return Reporter(folder, delivery, ranks.size)


def _check_devices(shards: Sequence[Shard]) -> None:
    devices = {shard.weight().device for shard in shards}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise LayoutError(
            f"the parameters of one process lie on {len(devices)} devices ({names}); "
            "attach one monitor per device with `include`"
        )


def _as_list(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
