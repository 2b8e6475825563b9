"""The only file of the trainer that knows distmon, which it imports only with `--monitor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from launch.ranks import BadInput

if TYPE_CHECKING:
    from distmon.config import MonitorConfig
    from launch.train import Trainer

PREFIX = "--monitor."
STOPPED = 86  # exit code of `distmon.TrainingStopped`, known without importing distmon


def split_monitor_options(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--monitor.KEY VALUE` and `--monitor.KEY=VALUE` off the command line.

    Returns the other arguments, and keyword arguments for `distmon.attach`.
    """
    others: list[str] = []
    settings: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(PREFIX):
            others.append(argument)
            continue
        option, equals, text = argument.partition("=")
        if not equals and (text := next(remaining, "--")).startswith("--"):
            raise BadInput(f"{option} needs a value")
        with bad_settings_are_bad_input():
            from distmon.integrations.launcher.command import set_option

            set_option(settings, option, PREFIX, text)
    return others, settings


def check_settings(settings: dict[str, Any]) -> MonitorConfig:
    """Return the validated configuration, before anything slow starts."""
    from distmon.config import load_config

    overrides = dict(settings)
    with bad_settings_are_bad_input():
        return load_config(overrides.pop("config", None), overrides)


def attach_monitor(trainer: Trainer, state: dict[str, Any] | None) -> Any:
    """Attach to the wrapped model before its first forward pass; a collective.

    `state` is what the checkpoint that the run resumes from holds of its monitor.
    """
    import distmon

    options, parallel = trainer.options, trainer.parallel
    settings = {
        "console": trainer.console,
        "total_steps": options.steps,
        "on_checkpoint": lambda alert: trainer.save_checkpoint(),  # noqa: ARG005
        **options.monitor_settings,
    }
    with trainer.ranks.stop_together(), bad_settings_are_bad_input():
        if parallel.reports_steps:
            import distmon.deepspeed

            tokens = trainer.ranks.share(options.tokens_per_step)
            monitor = distmon.deepspeed.attach(parallel.module, tokens=tokens, **settings)
        else:
            monitor = distmon.attach(parallel.module, parallel.optimizer, **settings)
        if state is not None:
            monitor.load_state_dict(state)
    if options.tasks:
        parallel.report_tasks = monitor.task_losses
    return monitor


@contextmanager
def bad_settings_are_bad_input() -> Iterator[None]:
    """Raise what distmon refuses in one sentence as `BadInput`."""
    from distmon.errors import DistmonError

    try:
        yield
    except DistmonError as error:
        raise BadInput(str(error)) from None
