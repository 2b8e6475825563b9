"""Rank 0: open the run folder, and what derives, evaluates and writes into it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from distmon.config import MonitorConfig
from distmon.layout import Shard
from distmon.record.builder import RecordBuilder
from distmon.rules import RuleEngine
from distmon.rules.engine import ActiveRule
from distmon.rules.user_code import UserCode
from distmon.runs.open_run import open_run
from distmon.runtime.training_side import TrainingSide
from distmon.runtime.worker import Evaluation, EvaluationWorker, OnAlerts
from distmon.runtime.writer_process import WriterProcess
from distmon.runtime.writer_start import RunningWriter, WriterStartError, start_writer
from distmon.sampling.plan import SamplePlan
from distmon.sinks import Delivery, build_factories, preload
from distmon.sinks.console import announce
from distmon.sinks.environment import TrainingProcess
from distmon.sinks.gaps import GapLog
from distmon.untrusted.terminal import terminal
from distmon.writer.evaluator import Evaluator
from distmon.writer.mailbox import Mailbox, encode
from distmon.writer.session import Assignment, Terminal

log = logging.getLogger("distmon")
_SLACK: Final = 4 << 20
"""Bytes by which the state may grow until another writer continues from it."""


@dataclass(frozen=True)
class Rank0:
    """What rank 0 makes records from."""

    settings: MonitorConfig
    builder: RecordBuilder
    rules: Sequence[ActiveRule]
    user_code: UserCode
    on_alerts: OnAlerts
    console: Console | None
    """Passed by the user."""
    observation_bytes: int
    described: Mapping[str, Any]
    """Config, parameters and reading, for the run folder."""


class StartingWriter:
    """A writer process that imports what it needs while `attach` continues."""

    def __init__(self, settings: MonitorConfig, undo: ExitStack) -> None:
        self.mailbox = Mailbox()
        self.running: RunningWriter | None = None
        self._problem = ""
        undo.callback(self.stop)
        try:
            self.running = start_writer(self.mailbox.file, settings.sinks)
        except WriterStartError as error:
            self._problem = str(error)

    def ready(self) -> RunningWriter | None:
        """Return the writer once it is ready; None, with a log line, where there is none."""
        if self.running is not None:
            try:
                self.running.wait_until_ready()
            except WriterStartError as error:
                self._problem, self.running = str(error), None
        if self._problem:
            log.warning(
                "distmon: no writer process (%s); records are written by threads of this process",
                self._problem,
            )
        return self.running

    def stop(self) -> None:
        """End what was started, when `attach` fails."""
        if self.running is not None:
            self.running.kill()
        self.mailbox.close()


def open_evaluation(rank0: Rank0, starting: StartingWriter | None, undo: ExitStack) -> Evaluation:
    """Open the run folder and what writes to it: the writer process, or threads without one."""
    settings, console = rank0.settings, rank0.console
    folder = open_run(settings.run_dir, settings.strict, rank0.described, settings.spool_dir)
    undo.callback(folder.release)
    factories = build_factories(settings, folder, console)
    if "console" in settings.sinks:
        announce(console or terminal(), folder, settings)
    writer = None if starting is None else starting.ready()
    if writer is None or starting is None:
        preload(settings.sinks)
        delivery = Delivery(factories, settings.queue_size, GapLog(folder))
        rules = RuleEngine(rank0.rules, rank0.user_code)
        evaluator = Evaluator(rank0.builder, rules, delivery, settings.check_records)
        return EvaluationWorker(evaluator, folder, rank0.on_alerts)
    users = [active for active in rank0.rules if active.rule.users]
    shown = console or terminal()
    side = TrainingSide(
        settings,
        folder,
        dict(factories),
        RuleEngine(users, rank0.user_code) if users else None,
        rank0.on_alerts,
        console,
        in_notebook=shown.is_jupyter,
    )
    builder = rank0.builder
    assignment = Assignment(
        config=settings,
        folder=folder,
        inputs=builder.inputs,
        training=TrainingProcess().fixed(),
        terminal=None if shown.is_jupyter else Terminal.of(shown),
        own_rules=frozenset(active.rule.name for active in users),
    )
    size = sum(part.nbytes for part in encode(assignment))
    starting.mailbox.allocate(rank0.observation_bytes, 2 * size + _SLACK)
    starting.running = None  # closed by what gets it
    return WriterProcess(
        writer, starting.mailbox, assignment, side, rank0.rules, builder.mfu_source
    )


def describe_run(
    settings: MonitorConfig, shards: Sequence[Shard], plan: SamplePlan
) -> dict[str, Any]:
    """Return what the run folder says of the run."""
    parameters = [
        {
            "name": shard.name,
            "shape": list(shard.global_shape),
            "dtype": str(shard.dtype).removeprefix("torch."),
            "requires_grad": shard.requires_grad(),
            "sampled": count,
        }
        for shard, count in zip(shards, plan.numbers.count.tolist(), strict=True)
    ]
    return {
        "config": settings.model_dump(mode="json"),
        "parameters": parameters,
        "reading": plan.describe(),
    }
