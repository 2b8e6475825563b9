"""`distmon.attach`: prepare on this rank -> exchange with all ranks -> build -> agree.

When one rank fails, all ranks still take part in the exchange and in the agreement, and all of them
raise.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from rich.console import Console
from torch import nn

from distmon.collect.own_hooks import OWNER, OwnerMark
from distmon.config import MonitorConfig, load_config
from distmon.layout import capture, named_modules
from distmon.layout.parameter_table import (
    held_shares,
    parameter_names,
)
from distmon.monitor import Monitor
from distmon.probe.read_cost import gradient_read_seconds
from distmon.reduce.channel import Channel
from distmon.reduce.exchange import exchange
from distmon.reduce.process_group import Ranks
from distmon.rules.base import Rule
from distmon.runtime.actions import AlertCall, Callbacks
from distmon.runtime.agreement import COMPARED
from distmon.runtime.assembly import assemble
from distmon.runtime.attach_agreement import LocalSteps, agree_to_begin, open_channels
from distmon.runtime.blueprint import Blueprint, Prepared, combine, prepare
from distmon.runtime.disabled import DisabledMonitor
from distmon.runtime.source import Config, Optimizers, Options, Source, with_float64

ENGINES: Final = {("deepspeed", "DeepSpeedEngine"): "distmon.integrations.deepspeed.attach_engine"}
"""Integrations for engines that `attach` takes in place of a model, by package and class."""
_Result = TypeVar("_Result")
log = logging.getLogger("distmon")


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizers = None,
    config: Config = None,
    *,
    hooks: bool = True,
    console: Console | None = None,
    rename: Callable[[str], str] = str,
    own_rules: Sequence[Rule] = (),
    on_alert: AlertCall | None = None,
    on_checkpoint: AlertCall | None = None,
    **overrides: Any,
) -> Monitor | DisabledMonitor:
    """Monitor `model` while `optimizer` (or several) trains it.

    Call it on every rank, after wrapping the model and before its first forward. `config` is a
    mapping, a YAML or JSON file, or a `MonitorConfig`; keyword arguments override its keys. With
    `hooks=False` the trainer calls `before_step()` and `after_step()` itself. `console` is where
    the console sink prints; pass that of your progress bar. A mistake raises a `DistmonError`.

    In a pipeline each rank passes its own stage, or a list of them. A parameter is known by its
    name in the whole model; where stages number their layers from 0, `rename` returns that name.

    `own_rules` are functions decorated with `distmon.rule`; pass the same on every rank.

    `on_alert` is called with every alert: on rank 0, off the training thread, within
    `callback_timeout_s`; with `actions.on_alert_everywhere` on every rank, at the same step, from
    within `Monitor.step`. So is `on_checkpoint`, where `actions.checkpoint` asks for one.

    `model` may be a DeepSpeed engine, without an optimizer: see `distmon.deepspeed.attach`.
    """
    options = Options(
        config=config,
        overrides=overrides,
        hooks=hooks,
        console=console,
        own_rules=own_rules,
        callbacks=Callbacks(on_alert, on_checkpoint),
    )
    if optimizer is None and (integration := _integration_for(model)):
        monitor: Monitor | DisabledMonitor = integration.attach_engine(model, options)
        return monitor
    modules = _modules(model)
    source = Source(
        find_shards=lambda settings: capture(model, settings.include, settings.exclude, rename),
        device=_device_of(modules),
        optimizers=optimizer,
        find_modules=lambda: named_modules(model, rename),
        models=modules,
    )
    return attach_source(source, options)


def attach_source(source: Source, options: Options) -> Monitor | DisabledMonitor:
    """Attach a monitor to what `source` describes; every integration calls this."""
    with _collector_paused():
        return _attach_source(source, options)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python from looking for garbage among the thousands of objects that are only made here:
    with 100 000 parameters that takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _attach_source(source: Source, options: Options) -> Monitor | DisabledMonitor:
    source = with_float64(source)
    local = LocalSteps()
    settings = local.run(lambda: load_config(options.config, options.overrides), MonitorConfig())
    if options.hooks:  # a trainer that calls before_step() itself may do so for several
        local.run(lambda: _close_previous(source.models), None)
    with ExitStack() as undo:
        ranks = Ranks(settings.timeout_s, source.device)
        undo.callback(ranks.close)
        begin = agree_to_begin(ranks, settings, local)
        if not begin.enabled:
            return DisabledMonitor()
        spectra = local.run(lambda: open_channels(ranks, settings, begin, undo), None)
        prepared = local.run(lambda: prepare(source, settings, options.own_rules), Prepared())
        contents = exchange(ranks, prepared.contents)
        hosts = ranks.hosts()
        names = parameter_names(contents)
        held = local.run(lambda: held_shares(names, prepared.shards), [0.0] * len(names))
        copies = ranks.most_copies(held)
        seconds = local.run(lambda: gradient_read_seconds(prepared.shards), 0.0)
        seconds = ranks.slowest(seconds)
        monitor = local.run(
            lambda: _build(
                combine(prepared, contents, hosts, seconds, copies, settings, ranks, source.device),
                spectra,
                source,
                options,
                undo,
            ),
            None,
        )
        hashes = dict.fromkeys(COMPARED, 0)
        if monitor is not None:
            hashes = local.run(lambda: monitor.cycle.observer.agreement, hashes)
        local.agree(ranks, hashes)  # nothing after it can fail on one rank alone
        assert monitor is not None
        undo.pop_all()
    return monitor


def _build(
    blueprint: Blueprint,
    spectra: Channel | None,
    source: Source,
    options: Options,
    undo: ExitStack,
) -> Monitor:
    """Return a monitor with its hooks installed; `undo` gets what removes them."""
    parts = assemble(blueprint, source, options, undo)
    if spectra is not None:
        parts.cycle.observer.spectra.open(spectra)
    monitor = Monitor(parts)
    undo.callback(monitor.close)
    monitor.install_model_hooks(source.models)
    if options.hooks:
        monitor.install_hooks()
    return monitor


def _close_previous(models: Iterable[nn.Module]) -> None:
    """Close the monitor of each of these models, which a mark on the model names."""
    for model in models:
        mark = model.__dict__.get(OWNER)
        if isinstance(mark, OwnerMark):
            log.info("distmon: closing the earlier monitor of this %s", type(model).__name__)
            mark.owner.close()


def is_engine(model: object) -> bool:
    """Return whether `model` is an engine with an integration of its own, such as DeepSpeed's."""
    return _integration_for(model) is not None


def _integration_for(model: object) -> Any:
    """Return the module that attaches to such an engine; None for a plain model.

    Without importing the engine's package: a process that has an engine has imported it.
    """
    for base in type(model).__mro__:
        package = base.__module__.partition(".")[0]
        if name := ENGINES.get((package, base.__name__)):
            return import_module(name)
    return None


def _modules(model: object) -> list[nn.Module]:
    """Return the modules that were passed; `capture` names what is not one."""
    given = model if isinstance(model, list | tuple) else [model]
    return [module for module in given if isinstance(module, nn.Module)]


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first collective, also for a model that cannot be observed."""
    for module in modules:
        for parameter in module.parameters():
            return torch.device("cpu") if parameter.is_meta else parameter.device
    return torch.device("cpu")
