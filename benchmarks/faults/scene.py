"""One small training, with or without the monitor, in which a fault happens."""

from __future__ import annotations

import io
import logging
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter  # this one, also when a fault replaces it in `time`
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

STEPS: Final = 30
FAULT_AT: Final = 10
RESTORED_AT: Final = 20
LONGEST_S: Final = 100.0
"""A training that takes longer hangs."""


@dataclass
class Scene:
    """What a fault can reach."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    attach: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `distmon.attach`."""
    report: Callable[[int, Any], dict[str, Any]] = lambda step, loss: {"loss": loss}  # noqa: ARG005
    """Arguments of `monitor.step`."""
    monitor: Any = None
    model: Any = None
    optimizer: Any = None
    close: bool = True
    """Whether the training closes the monitor."""

    @property
    def run(self) -> Path:
        """The run folder that the config names."""
        return self.folder / "run"


Act = Callable[[Scene], None]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: before attach, in the middle, and what is put right again."""

    family: str
    name: str
    before: Act | None = None
    middle: Act | None = None
    restored: Act | None = None
    takes: bool = False
    """Whether the fault takes the records before it: only those after it are counted as lost."""
    ends: bool = False
    """Whether monitoring ends with it, as asked for."""
    refused: bool = False
    """Whether `attach` may raise a DistmonError: a mistake in the call itself."""


@dataclass
class Outcome:
    """What happened to training and records."""

    losses: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    attach_s: float = 0.0
    reached_loop: str = ""
    """The exception that left the monitor."""
    refused: str = ""
    """The DistmonError of attach."""
    traceback: str = ""
    """A traceback in the log or on stderr that is not the fault's own."""
    missing: set[int] = field(default_factory=set)
    """Observed steps without a record in the run folder."""
    named: bool = False
    """Whether a message or the folder says that something is missing."""
    hang: bool = False
    messages: list[str] = field(default_factory=list)


class _HangError(BaseException):
    pass


def train(fault: Fault | None, folder: Path, writer: str = "process") -> Outcome:
    """Train; with `fault` None without the monitor: the twin."""
    outcome = Outcome()
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("distmon").addHandler(handler)
    logging.getLogger("distmon").propagate = False

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise _HangError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        _train(fault, folder, writer, outcome)
    except _HangError:
        outcome.hang = True
        outcome.reached_loop = traceback.format_exc(limit=-3)
    except BaseException:
        outcome.reached_loop = traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    text = log.getvalue()
    outcome.messages = text.splitlines()[:20]
    if "Traceback (most recent call last)" in text:
        outcome.traceback = text[:2000]
    return outcome


def _train(fault: Fault | None, folder: Path, writer: str, outcome: Outcome) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = torch.Generator().manual_seed(1)
    scene = Scene(folder, model=model, optimizer=optimizer)
    scene.config = {
        "interval": 1,
        "first_observation": 1,
        "budget": None,
        "sinks": ["jsonl", "arrow"],
        "run_dir": str(scene.run),
        "writer": writer,
        "callback_timeout_s": 1.0,
    }
    if fault is not None:
        _attach(fault, scene, outcome)
    for step in range(1, STEPS + 1):
        if fault is not None and step == FAULT_AT and fault.middle is not None:
            fault.middle(scene)
        if fault is not None and step == RESTORED_AT and fault.restored is not None:
            fault.restored(scene)
        inputs = torch.randn(16, 8, generator=batches)
        begin = perf_counter()
        optimizer.zero_grad()
        loss = model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if scene.monitor is not None:
            scene.monitor.step(**scene.report(step, loss))
        outcome.longest_s = max(outcome.longest_s, perf_counter() - begin)
        outcome.losses.append(float(loss.detach()))
        time.sleep(0.002)  # so that the sinks get their turn, as beside steps of usual length
    if scene.monitor is not None and scene.close:
        scene.monitor.close()
    if fault is not None and not outcome.refused:
        _count_records(scene, outcome)


def _attach(fault: Fault, scene: Scene, outcome: Outcome) -> None:
    import distmon
    from distmon.errors import DistmonError

    if fault.before is not None:
        fault.before(scene)
    begin = perf_counter()
    try:
        scene.monitor = distmon.attach(scene.model, scene.optimizer, scene.config, **scene.attach)
    except DistmonError as error:
        outcome.refused = str(error)
        if not fault.refused:
            raise
    outcome.attach_s = perf_counter() - begin


def _count_records(scene: Scene, outcome: Outcome) -> None:
    """Compare what the folders of this run have with what was observed."""
    from distmon.errors import DistmonError
    from distmon.runs.reader import read_run

    steps: set[int] = set()
    candidates = {scene.run, *scene.folder.glob("run*"), _written_to(scene)}
    for folder in sorted(filter(None, candidates)):
        try:
            run = read_run(folder, all_attempts=True)
        except DistmonError:
            continue
        steps |= {record["step"] for record in run.records}
        if run.problems:
            outcome.named = True
    outcome.missing = set(range(1, STEPS + 1)) - steps


def _written_to(scene: Scene) -> Path | None:
    worker = getattr(getattr(scene.monitor, "cycle", None), "worker", None)
    path: Path | None = getattr(worker, "path", None)
    return path
