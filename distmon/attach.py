"""`distmon.attach`: prepare on this rank -> exchange with all ranks -> build -> agree.

When one rank fails, all ranks still take part in the exchange and in the agreement, and all of them
raise.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from rich.console import Console
from torch import nn

from distmon.collect.gradient_gain import Blocks, candidates, choose
from distmon.collect.inside.choosing import candidates as inside_candidates
from distmon.collect.inside.choosing import choose as choose_inside
from distmon.collect.inside.inside import WatchedModel
from distmon.collect.own_hooks import OWNER, OwnerMark
from distmon.config import MonitorConfig, load_config
from distmon.errors import DistmonError, PlanMismatchError
from distmon.layout import NamedModule, Shard, capture, named_modules, written_module
from distmon.layout.checks import check_devices
from distmon.layout.parameter_table import (
    RankContents,
    complete,
    describe,
    held_shares,
    merge,
    merge_modules,
    parameter_names,
)
from distmon.monitor import Monitor
from distmon.probe.read_cost import gradient_read_seconds
from distmon.reduce.channel import Channel
from distmon.reduce.exchange import exchange
from distmon.reduce.majority import by_value
from distmon.reduce.process_group import Ranks
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.alert_patterns import check_patterns
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule
from distmon.runtime.actions import AlertCall, Callbacks
from distmon.runtime.agreement import COMPARED
from distmon.runtime.assembly import Blueprint, assemble
from distmon.runtime.disabled import DisabledMonitor
from distmon.runtime.source import Config, Optimizers, Options, Source, with_float64
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
    local = _LocalSteps()
    settings = local.run(lambda: load_config(options.config, options.overrides), MonitorConfig())
    if options.hooks:  # a trainer that calls before_step() itself may do so for several
        local.run(lambda: _close_previous(source.models), None)
    with ExitStack() as undo:
        ranks = Ranks(settings.timeout_s, source.device)
        undo.callback(ranks.close)
        begin = _agree_to_begin(ranks, settings, local)
        if not begin.enabled:
            return DisabledMonitor()
        spectra = local.run(lambda: _open_channels(ranks, settings, begin, undo), None)
        prepared = local.run(lambda: _prepare(source, settings, options.own_rules), _Prepared())
        contents = exchange(ranks, prepared.contents)
        hosts = ranks.hosts()
        names = parameter_names(contents)
        held = local.run(lambda: held_shares(names, prepared.shards), [0.0] * len(names))
        copies = ranks.most_copies(held)
        seconds = local.run(lambda: gradient_read_seconds(prepared.shards), 0.0)
        seconds = ranks.slowest(seconds)
        monitor = local.run(
            lambda: _build(
                _blueprint(
                    prepared, contents, hosts, seconds, copies, settings, ranks, source.device
                ),
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


@dataclass(frozen=True)
class _Begin:
    """What all ranks know before anything is built; the same on each of them."""

    enabled: bool
    """Whether they continue; False when monitoring is disabled on all of them."""
    failed: bool
    """A rank has failed: all of them raise at the agreement."""
    spectra: bool
    """All of them estimate spectral norms."""


def _agree_to_begin(ranks: Ranks, settings: MonitorConfig, local: _LocalSteps) -> _Begin:
    """Compare what ranks must know of each other before they create further groups.

    Raises on every rank when they differ in it. A rank whose config is invalid takes part with the
    default one, and raises its error when all ranks have met in the end.
    """
    with_spectra = "spectra" in settings.inside.kinds
    mine = [settings.enabled, settings.transport == "device", with_spectra, local.failed]
    table = ranks.gather(torch.tensor(mine, dtype=torch.int64))
    enabled, on_device, spectra, failed = table.T.tolist()
    if not any(failed):
        for what, values in (("enabled", enabled), ("transport: device", on_device)):
            if len({*values}) > 1:
                words = by_value([bool(value) for value in values])
                raise PlanMismatchError(
                    f"ranks have different settings of {what} ({words}); set the same on every rank"
                )
    return _Begin(any(failed) or all(enabled), any(failed), all(spectra))


def _open_channels(
    ranks: Ranks, settings: MonitorConfig, begin: _Begin, undo: ExitStack
) -> Channel | None:
    """Create the groups that all ranks need; return that of the spectral norms."""
    if begin.failed:
        return None
    ranks.open(settings.transport)
    if not begin.spectra:
        return None
    channel = ranks.open_channel()
    undo.callback(channel.close)
    return channel


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
    roots: Mapping[str, nn.Module] = field(default_factory=dict)
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
    flow, inside = settings.flow, settings.inside
    if source.find_modules is not None and (flow.enabled or inside.kinds):
        modules, globs = source.find_modules(), flow.blocks
    roots = _roots(source.models)
    contents = RankContents(
        describe(shards),
        candidates(modules, globs) if flow.enabled or inside.kinds else (),
        inside_candidates(modules, roots, inside) if inside.kinds else (),
    )
    return _Prepared(shards, modules, roots, globs, active, contents)


def _roots(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the models themselves, without wrappers, by the name that they get in records."""
    names = ["(model)"] if len(models) == 1 else [f"(model {i})" for i in range(len(models))]
    return {name: written_module(model) for name, model in zip(names, models, strict=True)}


def _blueprint(
    prepared: _Prepared,
    contents: Mapping[int, RankContents],
    hosts: tuple[str, ...],
    seconds: float,
    copies: int,
    settings: MonitorConfig,
    ranks: Ranks,
    device: torch.device,
) -> Blueprint:
    """Combine the contents of this rank with those of the others."""
    table = merge({rank: each.parameters for rank, each in contents.items()})
    sizes = {entry.name: math.prod(entry.shape) for entry in table}
    modules = merge_modules([each.modules for each in contents.values()])
    chain = choose(modules, sizes, prepared.globs)
    catalog = choose_inside(
        [each.inside for each in contents.values()],
        chain.names,
        {entry.name: entry.shape for entry in table},
        settings.inside,
    )
    return Blueprint(
        settings=settings,
        ranks=ranks,
        shards=complete(table, prepared.shards, device),
        rules=prepared.rules,
        blocks=chain if settings.flow.enabled else Blocks(),
        modules={each.name: each.called for each in prepared.modules},
        in_stages=len(contents) > 1,
        hosts=hosts,
        reading=choose_reading(settings.sample_size, settings.budget, settings.interval, seconds),
        catalog=catalog,
        watched=WatchedModel(prepared.modules, prepared.roots, in_stages=len(contents) > 1),
        copies=copies,
    )


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
