"""`distmon.attach`: prepare on this rank -> exchange with all ranks -> build -> agree.

When one rank fails, all ranks still take part in the exchange and in the agreement, and all of them
raise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from rich.console import Console
from torch import nn

from distmon.collect.gradient_gain import candidates, choose
from distmon.collect.own_hooks import OwnHook
from distmon.config import MonitorConfig, load_config
from distmon.errors import DistmonError, PlanMismatchError
from distmon.layout import NamedModule, Shard, capture, named_modules
from distmon.layout.checks import check_devices
from distmon.layout.parameter_table import RankContents, complete, describe, merge, merge_modules
from distmon.monitor import Monitor
from distmon.probe.read_cost import gradient_read_seconds
from distmon.reduce.exchange import exchange
from distmon.reduce.process_group import Ranks, by_value
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.alert_patterns import check_patterns
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule
from distmon.runtime.actions import AlertCall, Callbacks
from distmon.runtime.agreement import COMPARED
from distmon.runtime.assembly import Blueprint, assemble
from distmon.runtime.disabled import DisabledMonitor
from distmon.runtime.source import Config, Optimizers, Options, Source
from distmon.sampling.reading import choose_reading

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
    local = _LocalSteps()
    settings = local.run(lambda: load_config(options.config, options.overrides), MonitorConfig())
    if options.hooks:  # a trainer that calls before_step() itself may do so for several
        for model in source.models:
            _close_previous(model)
    with ExitStack() as undo:
        ranks = Ranks(settings.timeout_s, source.device, settings.transport)
        undo.callback(ranks.close)
        if not _agree_to_begin(ranks, settings, local):
            return DisabledMonitor()
        prepared = local.run(lambda: _prepare(source, settings, options.own_rules), _Prepared())
        contents = exchange(ranks, prepared.contents)
        hosts = ranks.hosts()
        seconds = local.run(lambda: gradient_read_seconds(prepared.shards), 0.0)
        seconds = ranks.slowest(seconds)
        parts = local.run(
            lambda: assemble(
                _blueprint(prepared, contents, hosts, seconds, settings, ranks, source.device),
                source,
                options,
                undo,
            ),
            None,
        )
        hashes = dict.fromkeys(COMPARED, 0) if parts is None else parts.cycle.observer.agreement
        local.agree(ranks, hashes)
        assert parts is not None
        monitor = Monitor(parts)
        undo.callback(monitor.close)
        monitor.install_model_hooks(source.models)
        if options.hooks:
            monitor.install_hooks()
        undo.pop_all()
    return monitor


def _agree_to_begin(ranks: Ranks, settings: MonitorConfig, local: _LocalSteps) -> bool:
    """Return whether all ranks have monitoring enabled; False when none has.

    Raises on every rank when ranks differ. A rank whose config is invalid takes part with the
    default one, and raises its error when all ranks have met in the end.
    """
    mine = [settings.enabled, settings.transport == "device", local.failed]
    enabled, on_device, failed = ranks.gather(torch.tensor(mine, dtype=torch.int64)).T.tolist()
    if not any(failed):
        for what, values in (("enabled", enabled), ("transport: device", on_device)):
            if len({*values}) > 1:
                words = by_value([bool(value) for value in values])
                raise PlanMismatchError(
                    f"ranks have different settings of {what} ({words}); set the same on every rank"
                )
    return any(failed) or all(enabled)


class _LocalSteps:
    """Runs steps that may fail on this rank alone, so that every rank reaches the agreement."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, step: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return the result of `step`, or `otherwise` when it or an earlier step failed."""
        if self._error is None:
            try:
                return step()
            except Exception as error:
                self._error = error
        return otherwise

    @property
    def failed(self) -> bool:
        """Whether a step has failed here."""
        return self._error is not None

    def agree(self, ranks: Ranks, hashes: Mapping[str, int]) -> None:
        """Raise on every rank when one failed or differs; prefer this rank's own error."""
        try:
            ranks.agree(hashes, self._error is None)
        except DistmonError:
            if self._error is not None:
                raise self._error from None
            raise


@dataclass(frozen=True)
class _Prepared:
    """What this rank has before the exchange."""

    shards: Sequence[Shard] = ()
    modules: Sequence[NamedModule] = ()
    globs: tuple[str, ...] = ()
    rules: Sequence[ActiveRule] = ()
    contents: RankContents = field(default_factory=RankContents)


def _prepare(source: Source, settings: MonitorConfig, own_rules: Sequence[Rule]) -> _Prepared:
    rules = with_users_rules(BUILTIN, settings.rules, own_rules)
    active = configure(rules, settings.rules)
    check_patterns(settings.actions, [rule.name for rule in rules])
    shards = source.find_shards(settings)
    check_devices(shards)
    modules: Sequence[NamedModule] = ()
    globs: tuple[str, ...] = ()
    if source.find_modules is not None and settings.flow.enabled:
        modules, globs = source.find_modules(), settings.flow.blocks
    contents = RankContents(describe(shards), candidates(modules, globs))
    return _Prepared(shards, modules, globs, active, contents)


def _blueprint(
    prepared: _Prepared,
    contents: Mapping[int, RankContents],
    hosts: tuple[str, ...],
    seconds: float,
    settings: MonitorConfig,
    ranks: Ranks,
    device: torch.device,
) -> Blueprint:
    """Combine the contents of this rank with those of the others."""
    table = merge({rank: each.parameters for rank, each in contents.items()})
    sizes = {entry.name: math.prod(entry.shape) for entry in table}
    modules = merge_modules([each.modules for each in contents.values()])
    return Blueprint(
        settings=settings,
        ranks=ranks,
        shards=complete(table, prepared.shards, device),
        rules=prepared.rules,
        blocks=choose(modules, sizes, prepared.globs),
        modules={each.name: each.called for each in prepared.modules},
        in_stages=len(contents) > 1,
        hosts=hosts,
        reading=choose_reading(settings.sample_size, settings.budget, settings.interval, seconds),
    )


def _close_previous(model: nn.Module) -> None:
    """Close the monitors of this model: their hooks name them."""
    hooks: list[Any] = [*model._forward_hooks.values()]
    for hook in hooks:
        if isinstance(hook, OwnHook) and hook.owner is not None:
            log.info("distmon: closing the earlier monitor of this %s", type(model).__name__)
            hook.owner.close()


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
