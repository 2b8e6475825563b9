"""What `attach` gets: the model in training, and the options of the user."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from distmon.config import MonitorConfig
from distmon.device import has_float64
from distmon.layout import NamedModule, Shard
from distmon.layout.host_copies import copied_to_host
from distmon.rules.base import Rule
from distmon.runtime.actions import Callbacks

log = logging.getLogger("distmon")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Config = MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Source:
    """A model in training, and how this rank lists its shards and modules."""

    find_shards: Callable[[MonitorConfig], list[Shard]]
    """Lists what this rank holds, given the valid settings."""
    device: torch.device
    optimizers: Optimizers
    find_modules: Callable[[], Sequence[NamedModule]] | None = None
    """Lists the modules, some of which may be blocks; None to observe no blocks."""
    param_groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    """Param groups of all optimizers, where those of `optimizers` are not what the user set up."""
    models: Sequence[nn.Module] = ()
    """Modules whose calls mark the phases of a step."""
    skips_are_evidence: bool = False
    """No loss is scaled, so a step is skipped only when something is wrong."""


@dataclass(frozen=True)
class Options:
    """The arguments of `attach` that are not about the model."""

    config: Config = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys that override those of `config`."""
    hooks: bool = True
    """Let the optimizers call the monitor."""
    console: Console | None = None
    own_rules: Sequence[Rule] = ()
    callbacks: Callbacks = field(default_factory=Callbacks)


def with_float64(source: Source) -> Source:
    """Return the source, with its shards copied to the host where its device has no float64."""
    if has_float64(source.device.type):
        return source
    log.warning(
        "distmon: %s has no float64; weights and gradients are copied to the host at observed "
        "steps, which waits for the device",
        source.device.type,
    )
    return replace(
        source,
        device=torch.device("cpu"),
        find_shards=lambda settings: [*map(copied_to_host, source.find_shards(settings))],
    )
