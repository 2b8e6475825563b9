"""`attach`: a monitor on one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rich.console import Console

from distmon.deepspeed.block import settings_in
from distmon.deepspeed.engine_watch import EngineWatch
from distmon.errors import LayoutError
from distmon.layout.deepspeed import EngineLayout
from distmon.monitor import Monitor
from distmon.silent import SilentMonitor
from distmon.wiring import Config, watch

log = logging.getLogger("distmon")

WATCH = "distmon"
"""The engine's attribute that holds what watches it."""


def attach(
    engine: Any,
    config: Config = None,
    *,
    tokens: float | Callable[[], float] | None = None,
    console: Console | None = None,
    **overrides: Any,
) -> Monitor:
    """Watch a DeepSpeed engine. Call it on every rank, after `deepspeed.initialize`.

    `config` is a mapping, a file or a `MonitorConfig`; without it the `"distmon"` block of the
    engine's own config is taken, or the defaults. Nothing else has to be called: the engine tells
    the monitor about every step, its loss and its gradient norm, and carries the monitor's state in
    its checkpoints. `tokens` of this rank per optimizer step, a number or a function, give the
    throughput. A mistake is a `DistmonError`.
    """
    if _watching(engine) is not None:
        raise LayoutError("this engine is watched already; distmon.deepspeed.detach ends that")
    if config is None:
        config = settings_in(getattr(engine, "config", None))
    layout = EngineLayout(engine)
    monitor = watch(
        lambda settings: layout.shards(settings.include, settings.exclude),
        layout.device,
        layout.inner,
        config,
        find_modules=layout.modules,
        hooks=False,
        console=console,
        groups=layout.groups,
        models=[engine],
        skips_are_evidence=not layout.scales_loss,
        **overrides,
    )
    if not isinstance(monitor, SilentMonitor):
        watching = EngineWatch(engine, layout, monitor, tokens)
        watching.begin()
        setattr(engine, WATCH, watching)
    return monitor


def attach_by_block(engine: Any) -> Monitor | None:
    """Attach when the engine's config asks for it and there is something to train."""
    watching = _watching(engine)
    if watching is not None:
        return watching.monitor
    settings = settings_in(getattr(engine, "config", None))
    if settings is None or not settings.enabled:
        return None
    if not hasattr(engine.optimizer, "param_groups"):
        log.info("a DeepSpeed engine without an optimizer is not watched")
        return None
    return attach(engine, settings)


def detach(engine: Any) -> None:
    """End the watch and leave the engine as DeepSpeed made it. Safe to call twice."""
    watching = _watching(engine)
    if watching is not None:
        watching.end()
        delattr(engine, WATCH)


def _watching(engine: Any) -> EngineWatch | None:
    found = getattr(engine, "__dict__", {}).get(WATCH)
    return found if isinstance(found, EngineWatch) else None
