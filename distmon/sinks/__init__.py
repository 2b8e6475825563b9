"""Where records and alerts go."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Final

from rich.console import Console

from distmon.config import MonitorConfig
from distmon.errors import ConfigError
from distmon.redaction import Redactor
from distmon.run_folder import RunFolder
from distmon.sinks.base import Sink, SinkFactory
from distmon.sinks.delivery import AlertsOnly, Delivery

__all__ = ["Delivery", "Sink", "SinkFactory", "build_factories"]

OPTIONAL_PACKAGES: Final = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "prometheus": "prometheus_client",
}
"""By sink, which is also the name of the extra, what it imports."""
WITH_PARAM_TAGS: Final = {"tensorboard", "wandb"}


def build_factories(
    config: MonitorConfig,
    folder: RunFolder,
    console: Console | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[tuple[str, SinkFactory]]:
    """A factory for each configured sink, in their order, for `Delivery`; then those that `notify`
    and `actions` ask for.

    `ConfigError` when a sink's package is not installed, or a URL is wrong: better at attach than
    after an hour.
    """
    from distmon.sinks.tags import select_params

    for name, package in OPTIONAL_PACKAGES.items():
        if name in config.sinks and importlib.util.find_spec(package) is None:
            raise ConfigError(f"the sink \"{name}\" needs a package: pip install 'distmon[{name}]'")
    names = [str(row["name"]) for row in folder.parameters]
    selected: frozenset[str] = frozenset()
    if WITH_PARAM_TAGS & {*config.sinks}:
        selected = select_params(names, config.param_tags, config.param_tag_cap)

    def console_sink() -> Sink:
        from distmon.sinks.console import ConsoleSink

        return ConsoleSink(console or Console(), total_steps=config.total_steps)

    def jsonl_sink() -> Sink:
        from distmon.sinks.jsonl import JsonlSink

        return JsonlSink(folder)

    def arrow_sink() -> Sink:
        from distmon.sinks.arrow import ArrowSink

        return ArrowSink(folder)

    def tensorboard_sink() -> Sink:
        from distmon.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(folder, selected)

    def wandb_sink() -> Sink:
        from distmon.sinks.wandb import WandbSink

        return WandbSink(folder, config.wandb, selected)

    def prometheus_sink() -> Sink:
        from distmon.sinks.prometheus import PrometheusSink

        return PrometheusSink(config.prometheus, folder.path.resolve().name)

    factories: dict[str, SinkFactory] = {
        "console": console_sink,
        "jsonl": jsonl_sink,
        "arrow": arrow_sink,
        "tensorboard": tensorboard_sink,
        "wandb": wandb_sink,
        "prometheus": prometheus_sink,
    }
    return [
        *((name, factories[name]) for name in dict.fromkeys(config.sinks)),
        *_alert_factories(config, folder, os.environ if environ is None else environ),
    ]


def _alert_factories(
    config: MonitorConfig, folder: RunFolder, environ: Mapping[str, str]
) -> list[tuple[str, SinkFactory]]:
    """A lane `notify-slack` for each service, and one for debug bundles."""
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
        make_bundles = partial(BundleSink, folder, wanted, redactor, environ, sys.argv)
        factories.append(("bundle", make_bundles))
    return factories
