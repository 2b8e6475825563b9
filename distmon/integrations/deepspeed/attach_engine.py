"""`attach`: attach a monitor to one DeepSpeed engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from distmon.attach import attach_source
from distmon.config import MonitorConfig
from distmon.errors import LayoutError
from distmon.integrations.deepspeed.config_block import read_block
from distmon.integrations.deepspeed.engine_adapter import EngineAdapter
from distmon.layout.deepspeed import EngineLayout
from distmon.monitor import Monitor
from distmon.rules.base import Rule
from distmon.runtime.actions import AlertCall, Callbacks
from distmon.runtime.disabled import DisabledMonitor
from distmon.runtime.source import Config, Options, Source

log = logging.getLogger("distmon")

ADAPTER = "distmon"
"""The engine's attribute that holds its adapter."""


def attach(
    engine: Any,
    config: Config = None,
    *,
    tokens: float | Callable[[], float] | None = None,
    console: Console | None = None,
    own_rules: Sequence[Rule] = (),
    on_alert: AlertCall | None = None,
    on_checkpoint: AlertCall | None = None,
    **overrides: Any,
) -> Monitor | DisabledMonitor:
    """Monitor a DeepSpeed engine. Call it on every rank, after `deepspeed.initialize`.

    `config` is a mapping, a file or a `MonitorConfig`; by default the `"distmon"` block of the
    engine's own config, or the built-in defaults. Nothing else has to be called: the engine reports
    every step, its loss and its gradient norm to the monitor, and saves the monitor's state in its
    checkpoints. `tokens` is the number of tokens of this rank per optimizer step, a number or a
    function, for the throughput. Raises a DistmonError for invalid arguments.
    """
    options = Options(
        config=config,
        overrides=overrides,
        console=console,
        own_rules=own_rules,
        callbacks=Callbacks(on_alert, on_checkpoint),
    )
    return attach_engine(engine, options, tokens)


def attach_engine(
    engine: Any, options: Options, tokens: float | Callable[[], float] | None = None
) -> Monitor | DisabledMonitor:
    """Attach as `attach` does, with the options of `distmon.attach`; `tokens` may be among them."""
    overrides = dict(options.overrides)
    tokens = overrides.pop("tokens", tokens)
    options = replace(options, overrides=overrides)
    if _adapter_of(engine) is not None:
        raise LayoutError("this engine already has a monitor; call distmon.deepspeed.detach first")
    if options.config is None:
        options = replace(options, config=read_block(getattr(engine, "config", None)))
    layout = EngineLayout(engine)
    source = Source(
        find_shards=lambda settings: layout.shards(settings.include, settings.exclude),
        device=layout.device,
        optimizers=layout.inner,
        find_modules=layout.modules,
        param_groups=layout.groups,
        models=[engine],
        skips_are_evidence=not layout.scales_loss,
    )
    monitor = attach_source(source, replace(options, hooks=False))
    if isinstance(monitor, Monitor):
        adapter = EngineAdapter(engine, layout, monitor, tokens)
        adapter.begin()
        setattr(engine, ADAPTER, adapter)
    return monitor


def attach_if_configured(
    engine: Any, default: MonitorConfig | None = None
) -> Monitor | DisabledMonitor | None:
    """Attach if the engine's config has an enabled block and the engine has an optimizer.

    `default` stands for a block that is not there.
    """
    adapter = _adapter_of(engine)
    if adapter is not None:
        return adapter.monitor
    settings = read_block(getattr(engine, "config", None)) or default
    if settings is None or not settings.enabled:
        return None
    if not hasattr(engine.optimizer, "param_groups"):
        log.info("distmon: the DeepSpeed engine has no optimizer and is not monitored")
        return None
    return attach(engine, settings)


def detach(engine: Any) -> None:
    """Close the monitor and restore the engine's own methods. Safe to call twice."""
    adapter = _adapter_of(engine)
    if adapter is not None:
        adapter.end()
        delattr(engine, ADAPTER)


def _adapter_of(engine: Any) -> EngineAdapter | None:
    found = getattr(engine, "__dict__", {}).get(ADAPTER)
    return found if isinstance(found, EngineAdapter) else None
