"""The only place of the trainer that knows distmon, and it imports it only with `--monitor`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from bad_input import BadInput
from rich.console import Console
from torch import nn

PREFIX = "--monitor."
STOPPED = 86  # exit code of `distmon.TrainingStopped`, which is known without importing it


class Monitor(Protocol):
    """What the trainer calls of a distmon monitor."""

    def check(self, *, grad_norm: torch.Tensor) -> object: ...
    def step(self, *, loss: torch.Tensor | None, tokens: int, lr: float, step: int) -> object: ...
    def task_losses(self, losses: Mapping[str, torch.Tensor]) -> object: ...
    def evaluated(
        self, *, train_loss: float | None, val_loss: float, epoch: float | None
    ) -> object: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> object: ...
    def close(self) -> object: ...


class ToldByEngine:
    """The monitor of a DeepSpeed engine, which is told of every step by the engine itself."""

    def __init__(self, monitor: Any) -> None:
        self.evaluated = monitor.evaluated
        self.task_losses = monitor.task_losses
        self.state_dict = monitor.state_dict
        self.load_state_dict = monitor.load_state_dict
        self.close = monitor.close

    def check(self, *, grad_norm: torch.Tensor) -> None:
        """The engine has shown its own."""

    def step(self, *, loss: torch.Tensor | None, tokens: int, lr: float, step: int) -> None:
        """The engine has told it."""


@dataclass(frozen=True)
class MonitorRequest:
    """What the command line says about monitoring."""

    config: Path | None = None
    """`--monitor.config FILE`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Every other `--monitor.KEY VALUE`, nested as the config is."""


@dataclass(frozen=True)
class MonitorPlan:
    """What the trainer has to know of a valid monitor configuration."""

    run_dir: Path
    prints_loss: bool
    """Whether the monitor itself prints a line per observation."""
    saves: bool
    """Whether it may ask for a checkpoint."""


def split_monitor_options(arguments: list[str]) -> tuple[list[str], MonitorRequest]:
    """Take `--monitor.KEY VALUE` and `--monitor.KEY=VALUE` out of the command line.

    Dashes in KEY become underscores and dots lead into nested sections.
    """
    rest: list[str] = []
    config: Path | None = None
    overrides: dict[str, Any] = {}
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith(PREFIX):
            rest.append(argument)
            continue
        key, equals, text = argument.removeprefix(PREFIX).partition("=")
        if not equals:
            text = next(waiting, "--")
            if text.startswith("--"):
                raise BadInput(f"{PREFIX}{key} needs a value")
        if key == "config":
            config = Path(text)
        else:
            _put(overrides, key, text)
    return rest, MonitorRequest(config, overrides)


def _put(overrides: dict[str, Any], key: str, text: str) -> None:
    path = key.replace("-", "_").split(".")
    section: Any = overrides
    for part in path[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise BadInput(f"{PREFIX}{key} is inside a key that already has a value")
    section[path[-1]] = text if path == ["run_dir"] else parse_value(key, text)


def parse_value(key: str, text: str) -> Any:
    """`text` as YAML reads it: numbers, true and false, null, lists; anything else is text."""
    if not text.strip():
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise BadInput(f"{PREFIX}{key}: cannot read the value {text!r} as YAML") from None
    if isinstance(value, str):
        # YAML 1.1 takes 1e-3 for text because it has no dot.
        with contextlib.suppress(ValueError):
            return float(value)
    return value if isinstance(value, bool | int | float | list | dict | None) else text


def check_monitor(request: MonitorRequest) -> MonitorPlan:
    """Validate the configuration before anything slow starts."""
    from distmon.config import load_config
    from distmon.errors import DistmonError

    try:
        config = load_config(request.config, request.overrides)
    except DistmonError as error:
        raise BadInput(str(error)) from None
    prints_loss = config.enabled and "console" in config.sinks
    return MonitorPlan(config.run_dir, prints_loss, bool(config.actions.checkpoint))


def attach_monitor(
    request: MonitorRequest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    console: Console,
    steps: int,
    state: dict[str, Any] | None,
    tokens: int,
    save: Callable[[], object],
) -> Monitor:
    """Attach to the model as it is called, before the first forward pass, on every rank.

    `state` is what the checkpoint holds of an earlier monitor of this run; `tokens` are this rank's
    share of a step; `save` writes a checkpoint and is called on all ranks at the same step.
    """
    import distmon
    from distmon.errors import DistmonError

    common: dict[str, Any] = {
        "config": request.config,
        "console": console,
        "on_checkpoint": lambda alert: save(),  # noqa: ARG005
        "total_steps": steps,
        **request.overrides,
    }
    try:
        monitor: Monitor
        if isinstance(optimizer, torch.optim.Optimizer):
            monitor = distmon.attach(model, optimizer, **common)
        else:
            monitor = ToldByEngine(distmon.attach(model, tokens=tokens, **common))
        if state is not None:
            monitor.load_state_dict(state)
    except DistmonError as error:
        raise BadInput(str(error)) from None
    return monitor
