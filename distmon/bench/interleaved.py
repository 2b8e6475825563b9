"""Time contenders in turn, each on a real forward and backward pass.

So each finds caches as cold as in training, and drift of the machine affects all of them alike.
Their order changes from round to round. In a last step, which is not timed, the answer of each is
compared with the truth.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distmon.bench.contender import NONE, Contender, Session
from distmon.bench.training import Training
from distmon.bench.truth import ROUNDING, AnswerCheck, TruthSession, check_answer

LEAST_ROUNDS: Final = 3
"""For a slow contender too."""
QUIET_S: Final = 0.03
IDLE_S: Final = 1e-3
"""CPU time within QUIET_S of threads that have nothing to do; those of gloo poll a little."""
PATIENCE_S: Final = 5.0


@dataclass(frozen=True)
class Rounds:
    """How often each contender is timed."""

    number: int
    limit_s: float = math.inf
    """A contender whose observations have taken longer stops after three rounds."""
    race_limit_s: float = math.inf
    """After this time all contenders stop after three rounds."""


@dataclass(frozen=True)
class Measurement:
    """One number of one contender."""

    measure: str
    round: int
    value: float


@dataclass
class Lane:
    """One contender in the race."""

    contender: Contender
    session: Session
    unobserved: Session | None
    folder: Path
    bytes_before: int = 0
    steps: int = 0
    seconds: float = 0.0
    """That its observations have taken, warming up included."""
    found: list[Measurement] = field(default_factory=list)
    failed: str | None = None
    """The exception that ended its race."""
    check: AnswerCheck = field(default_factory=AnswerCheck)

    def add(self, measure: str, round: int, value: float) -> None:
        """Keep a number; the round before the first only warms up."""
        if round >= 0:
            self.found.append(Measurement(measure, round, value))


def settle() -> float:
    """Wait until threads and processes of contenders are idle; return the CPU time they took.

    Otherwise the next contender would pay for it.
    """
    import psutil

    # Once: listing all processes of the machine takes longer than a short wait.
    children = psutil.Process(os.getpid()).children(recursive=True)

    def spent() -> float:
        """Of this process exactly, of others in hundredths of a second."""
        total = time.process_time() - time.thread_time()
        for process in children:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    deadline = time.monotonic() + PATIENCE_S
    first = before = spent()
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        now = spent()
        if now - before < IDLE_S:
            break
        before = now
    return before - first


def race(
    training: Training,
    contenders: Sequence[Contender],
    folder: Path,
    rounds: Rounds,
    advance: Callable[[], None] = lambda: None,
    settle: Callable[[], float] = settle,
) -> list[Lane]:
    """Let the contenders observe `training` in turn; `none` has to be among them.

    `advance` is called after every round, of which there are two more than those timed.
    """
    lanes = [_attach(contender, training, folder / contender.name) for contender in contenders]
    begin = time.monotonic()
    for number in range(-1, rounds.number):
        if number < LEAST_ROUNDS or time.monotonic() - begin < rounds.race_limit_s:
            _round(training, lanes, number, rounds.limit_s, settle)
        advance()
    for lane in lanes:
        with _failing(lane):
            _end(lane, training)
    advance()
    return lanes


def _attach(contender: Contender, training: Training, folder: Path) -> Lane:
    lane = Lane(contender, Session(), None, folder)
    with _failing(lane):
        lane.session = contender.attach(training.model, training.optimizer, folder)
        lane.unobserved = lane.session.unobserved()
        lane.bytes_before = folder_bytes(folder)
    return lane


def _round(
    training: Training,
    lanes: Sequence[Lane],
    number: int,
    limit_s: float,
    settle: Callable[[], float],
) -> None:
    first = number % len(lanes)
    whole: list[tuple[Lane, float]] = []
    bare = 0.0
    settle()
    for lane in (*lanes[first:], *lanes[:first]):
        if lane.failed or (lane.seconds > limit_s and lane.steps > LEAST_ROUNDS):
            continue
        with _failing(lane):
            times = training.step(lane.session)
            lane.add("background", number, settle())
            lane.steps += 1
            if lane.contender.name == NONE.name:
                bare = times.whole
                lane.add("step", number, bare)
            elif lane.contender.timing == "whole step":
                whole.append((lane, times.whole))
            else:
                lane.seconds += times.calls + times.hooks
                lane.add("observation", number, times.calls + times.hooks)
                if times.hooks:
                    lane.add("hooks", number, times.hooks)
            if lane.unobserved is not None:
                idle = training.step(lane.unobserved)
                settle()
                lane.add("unobserved_step", number, idle.calls + idle.hooks)
    for lane, seconds in whole:
        lane.seconds += seconds - bare
        lane.add("observation", number, seconds - bare)


def _end(lane: Lane, training: Training) -> None:
    """Check the answer in a last step, then detach, which completes the files."""
    if lane.failed is not None:
        return
    exact = TruthSession(lane.session, training.model)
    training.step(exact)
    lane.steps += 1
    lane.session.detach()
    rounding = ROUNDING[next(training.model.parameters()).dtype]
    lane.check = check_answer(lane.contender.finds, lane.session.answer(), exact.truth, rounding)
    tags = lane.session.tags()
    if tags is not None:
        written = folder_bytes(lane.folder) - lane.bytes_before
        lane.add("tags", 0, tags)
        lane.add("log_bytes", 0, written / lane.steps)
    lane.session, lane.unobserved = Session(), None  # they hold the model


@contextmanager
def _failing(lane: Lane) -> Iterator[None]:
    """Take a contender that raises out of the race; the others continue."""
    try:
        yield
    except Exception as error:
        lane.failed = f"{type(error).__name__}: {error}"
        with suppress(Exception):
            lane.session.disable()
        with suppress(Exception):
            lane.session.detach()


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
