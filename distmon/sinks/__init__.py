"""Sinks: destinations of records and alerts on rank 0, one module per sink."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from rich.console import Console

from distmon.config import SINKS, MonitorConfig
from distmon.errors import ConfigError
from distmon.redaction import Redactor
from distmon.runs.run_folder import RunFolder
from distmon.sinks.base import Sink, SinkContext, SinkFactory
from distmon.sinks.delivery import AlertsOnly, Delivery, WritesFiles
from distmon.sinks.environment import TrainingProcess

__all__ = ["Delivery", "Sink", "SinkContext", "SinkFactory", "build_factories", "preload"]

WITH_PARAM_TAGS: Final = {"tensorboard", "wandb", "mlflow"}
"""Sinks that log the parameters of `param_tags`."""
WRITES_FILES: Final = {"jsonl", "arrow", "tensorboard"}
"""Sinks that write to the run folder."""
MOVABLE: Final = {"jsonl", "arrow"}
"""Those of them that can write to the second folder."""
_PRELOADED: Final = {
    "tensorboard": (
        "tensorboard.summary.writer.record_writer",
        "tensorboard.compat.proto.event_pb2",
    )
}
"""Modules that a sink imports when it is opened."""


def build_factories(
    config: MonitorConfig,
    folder: RunFolder,
    console: Console | None = None,
    environ: Mapping[str, str] | None = None,
    training: TrainingProcess | None = None,
) -> list[tuple[str, SinkFactory]]:
    """Return a factory for each configured sink, then those of `notify` and `actions`.

    Raises ConfigError when a sink's package is not installed or a URL is invalid, so that the error
    appears at attach and not after an hour.
    """
    from distmon.sinks.tags import select_params

    _check_installed(config.sinks)
    names = [str(row["name"]) for row in folder.parameters]
    selected: frozenset[str] = frozenset()
    if WITH_PARAM_TAGS & {*config.sinks}:
        selected = select_params(names, config.param_tags, config.param_tag_cap)

    context = SinkContext(config, folder, console, selected)
    return [
        *((name, _factory(name, context)) for name in dict.fromkeys(config.sinks)),
        *_alert_factories(
            config,
            folder,
            os.environ if environ is None else environ,
            training or TrainingProcess(),
        ),
    ]


def preload(sinks: Sequence[str]) -> None:
    """Import what these sinks need, before the training begins."""
    for sink in sinks:
        for module in (f"distmon.sinks.{sink}", *_PRELOADED.get(sink, ())):
            # Named when the sink is opened. A broken package may raise anything as it is imported.
            with suppress(Exception):
                found = importlib.import_module(module)
                if module.startswith("distmon.") and hasattr(found, "preload"):
                    found.preload()


def _check_installed(sinks: Sequence[str]) -> None:
    for name in sinks:
        if SINKS[name] and importlib.util.find_spec(SINKS[name]) is None:
            raise ConfigError(f"the sink \"{name}\" needs a package: pip install 'distmon[{name}]'")


def _factory(name: str, context: SinkContext) -> SinkFactory:
    make = partial(_open, name, context)
    return WritesFiles(make) if name in WRITES_FILES else make


def _open(name: str, context: SinkContext) -> Sink:
    """Import the module of a sink and make the sink, in its own thread."""
    open_sink = importlib.import_module(f"distmon.sinks.{name}").open_sink
    second = context.folder.second
    if second is not None and name in MOVABLE:
        from distmon.sinks.second_folder import TwoFolderSink

        return TwoFolderSink(
            name, context.folder, second, lambda folder: open_sink(replace(context, folder=folder))
        )
    sink: Sink = open_sink(context)
    return sink


def _alert_factories(
    config: MonitorConfig,
    folder: RunFolder,
    environ: Mapping[str, str],
    training: TrainingProcess,
) -> list[tuple[str, SinkFactory]]:
    """Return a factory such as `notify-slack` for each service, and one for debug bundles."""
    from distmon.sinks.apprise_service import open_services, resolve_urls
    from distmon.sinks.bundle import BundleSink
    from distmon.sinks.notify import NotifySink

    urls = resolve_urls(config.notify.urls, environ)
    run_name = folder.path.resolve().name
    factories: list[tuple[str, SinkFactory]] = []
    seen: Counter[str] = Counter()
    for service in open_services(config.notify, urls) if urls else ():
        seen[service.name] += 1
        number = f"-{seen[service.name]}" if seen[service.name] > 1 else ""
        make = AlertsOnly(partial(NotifySink, service, config.notify, run_name))
        factories.append((f"notify-{service.name}{number}", make))
    wanted = (*config.actions.bundle, *config.actions.stop)
    if wanted:
        redactor = Redactor(url.get_secret_value() for url in urls)
        make_bundles = partial(BundleSink, folder, wanted, redactor, environ, training)
        factories.append(("bundle", make_bundles))
    return factories
