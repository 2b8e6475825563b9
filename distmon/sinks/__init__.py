"""Where records and alerts go."""

from __future__ import annotations

import importlib.util
from typing import Final

from rich.console import Console

from distmon.config import MonitorConfig
from distmon.errors import ConfigError
from distmon.run_folder import RunFolder
from distmon.sinks.base import Sink, SinkFactory
from distmon.sinks.delivery import Delivery

__all__ = ["Delivery", "Sink", "SinkFactory", "build_factories"]

OPTIONAL_PACKAGES: Final = ("tensorboard", "wandb")
"""Sinks whose package, import name and extra are all called the same."""


def build_factories(
    config: MonitorConfig, folder: RunFolder, console: Console | None = None
) -> list[tuple[str, SinkFactory]]:
    """A factory for each configured sink, in their order, for `Delivery`.

    `ConfigError` when a sink's package is not installed: better at attach than after an hour.
    """
    from distmon.sinks.tags import select_params

    for name in OPTIONAL_PACKAGES:
        if name in config.sinks and importlib.util.find_spec(name) is None:
            raise ConfigError(f"the sink \"{name}\" needs a package: pip install 'distmon[{name}]'")
    names = [str(row["name"]) for row in folder.parameters]
    selected: frozenset[str] = frozenset()
    if set(config.sinks) & set(OPTIONAL_PACKAGES):
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

    factories: dict[str, SinkFactory] = {
        "console": console_sink,
        "jsonl": jsonl_sink,
        "arrow": arrow_sink,
        "tensorboard": tensorboard_sink,
        "wandb": wandb_sink,
    }
    return [(name, factories[name]) for name in dict.fromkeys(config.sinks)]
