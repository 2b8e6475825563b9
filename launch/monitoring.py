"""The only file of the trainer that knows distmon, which it imports only with `--monitor`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import yaml

from launch.ranks import BadInput

if TYPE_CHECKING:
    from distmon.config import MonitorConfig
    from launch.train import Trainer

PREFIX = "--monitor."
STOPPED = 86  # exit code of `distmon.TrainingStopped`, known without importing distmon
PATHS = (["run_dir"], ["config"])  # keys whose values stay text, even if they look like numbers


def split_monitor_options(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--monitor.KEY VALUE` and `--monitor.KEY=VALUE` off the command line.

    Returns the other arguments, and keyword arguments for `distmon.attach`: dashes in KEY become
    underscores, and dots lead into nested sections.
    """
    others: list[str] = []
    settings: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(PREFIX):
            others.append(argument)
            continue
        key, equals, text = argument.removeprefix(PREFIX).partition("=")
        if not equals:
            text = next(remaining, "--")
            if text.startswith("--"):
                raise BadInput(f"{PREFIX}{key} needs a value")
        section, path = settings, key.replace("-", "_").split(".")
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise BadInput(f"{PREFIX}{key} is inside a key that already has a value")
        section[path[-1]] = text if path in PATHS else parse_value(key, text)
    return others, settings


def parse_value(key: str, text: str) -> Any:
    """Return `text` as YAML reads it: numbers, true and false, null, lists; else as it is."""
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


def check_settings(settings: dict[str, Any]) -> MonitorConfig:
    """Return the validated configuration, before anything slow starts."""
    from distmon.config import load_config
    from distmon.errors import DistmonError

    overrides = dict(settings)
    try:
        return load_config(overrides.pop("config", None), overrides)
    except DistmonError as error:
        raise BadInput(str(error)) from None


def attach_monitor(trainer: Trainer, state: dict[str, Any] | None) -> Any:
    """Attach to the wrapped model before its first forward pass; a collective.

    `state` is what the checkpoint that the run resumes from holds of its monitor.
    """
    import distmon
    from distmon.errors import DistmonError

    options, parallel, optimizer = trainer.options, trainer.parallel, trainer.optimizer
    settings = {
        "console": trainer.console,
        "total_steps": options.steps,
        "on_checkpoint": lambda alert: trainer.save_checkpoint(),  # noqa: ARG005
        **options.monitor_settings,
    }
    with trainer.ranks.stop_together():
        try:
            if isinstance(optimizer, torch.optim.Optimizer):
                monitor: Any = distmon.attach(parallel.module, optimizer, **settings)
            else:
                import distmon.deepspeed

                tokens = trainer.ranks.share(options.tokens_per_step)
                monitor = distmon.deepspeed.attach(parallel.module, tokens=tokens, **settings)
                monitor = EngineMonitor(monitor)
            if state is not None:
                monitor.load_state_dict(state)
        except DistmonError as error:
            raise BadInput(str(error)) from None
    if options.tasks:
        parallel.report_tasks = monitor.task_losses
    return monitor


class EngineMonitor:
    """The monitor of a DeepSpeed engine, to which the engine itself reports every step."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)

    def check(self, **_: object) -> None:
        """Do nothing; the engine has reported its gradient norm."""

    def step(self, **_: object) -> None:
        """Do nothing; the engine has reported its step."""
