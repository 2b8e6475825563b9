"""The race: contenders take turns, each after a real forward and backward pass.

So each finds the caches as cold as in life, and drift of the machine falls on all of them. Their
order is another one in every round. In the last round, which is not timed, a referee looks at the
same step; whoever is wrong there, or fails on the way, has no times.
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

from distmon_benchmarks.contenders import Contender, Session
from distmon_benchmarks.contenders.none import NONE
from distmon_benchmarks.training import Training
from distmon_benchmarks.truth import ROUNDING, Referee, Verdict, judge

LEAST_ROUNDS: Final = 3
"""That also a slow contender gets."""
QUIET_S: Final = 0.03
IDLE_S: Final = 1e-3
"""CPU time in that while of threads that have nothing to do; those of gloo look around a little."""
PATIENCE_S: Final = 5.0


@dataclass(frozen=True)
class Finding:
    """One number of the race."""

    measure: str
    round: int
    value: float


@dataclass
class Lane:
    """One contender in the race."""

    contender: Contender
    session: Session
    off_interval: Session | None
    folder: Path
    bytes_before: int = 0
    turns: int = 0
    seconds: float = 0.0
    """That its observations have taken, warming up included."""
    findings: list[Finding] = field(default_factory=list)
    wrong: str | None = None
    """Why its numbers do not count."""
    verdict: Verdict | None = None
    """The referee's, if it came to that."""

    def add(self, measure: str, round: int, value: float) -> None:
        """Note a number; the round before the first only warms up."""
        if round >= 0:
            self.findings.append(Finding(measure, round, value))


def race(
    training: Training,
    contenders: Sequence[Contender],
    folder: Path,
    rounds: int,
    limit_s: float,
    advance: Callable[[], None] = lambda: None,
    race_limit_s: float = math.inf,
) -> list[Lane]:
    """Let the contenders watch `training` in turn; `none` has to be among them.

    `limit_s`: a contender whose observations have taken longer takes no more turns, after three
    rounds. `race_limit_s`: after so long there are no more rounds than three. `advance` is called
    after every round, of which there are two more than those timed.
    """
    lanes = [_attach(contender, training, folder / contender.name) for contender in contenders]
    begin = time.monotonic()
    for number in range(-1, rounds):
        if number < LEAST_ROUNDS or time.monotonic() - begin < race_limit_s:
            _round(training, lanes, number, limit_s)
        advance()
    for lane in lanes:
        with _blaming(lane):
            _end(lane, training)
    advance()
    return lanes


def _attach(contender: Contender, training: Training, folder: Path) -> Lane:
    lane = Lane(contender, Session(), None, folder)
    with _blaming(lane):
        lane.session = contender.attach(training.model, training.optimizer, folder)
        lane.off_interval = lane.session.off_interval()
        lane.bytes_before = folder_bytes(folder)
    return lane


def _round(training: Training, lanes: Sequence[Lane], number: int, limit_s: float) -> None:
    first = number % len(lanes)
    whole: list[tuple[Lane, float]] = []
    bare = 0.0
    settle()
    for lane in (*lanes[first:], *lanes[:first]):
        if lane.wrong or (lane.seconds > limit_s and lane.turns > LEAST_ROUNDS):
            continue
        with _blaming(lane):
            turn = training.turn(lane.session)
            lane.add("background", number, settle())
            lane.turns += 1
            if lane.contender.name == NONE.name:
                bare = turn.whole
                lane.add("step", number, bare)
            elif lane.contender.timing == "whole step":
                whole.append((lane, turn.whole))
            else:
                lane.seconds += turn.calls + turn.hooks
                lane.add("observation", number, turn.calls + turn.hooks)
                if turn.hooks:
                    lane.add("hooks", number, turn.hooks)
            if lane.off_interval is not None:
                idle = training.turn(lane.off_interval)
                settle()
                lane.add("skipped_step", number, idle.calls + idle.hooks)
    for lane, seconds in whole:
        lane.seconds += seconds - bare
        lane.add("observation", number, seconds - bare)


def _end(lane: Lane, training: Training) -> None:
    """The last turn, with the referee; then it leaves, and its files are complete."""
    if lane.wrong is not None:
        return
    referee = Referee(lane.session, training.model)
    training.turn(referee)
    lane.turns += 1
    lane.session.detach()
    rounding = ROUNDING[next(training.model.parameters()).dtype]
    verdict = judge(lane.contender.finds, lane.session.answer(), referee.truth, rounding)
    lane.wrong, lane.verdict = verdict.problem, verdict
    tags = lane.session.tags()
    if tags is not None:
        written = folder_bytes(lane.folder) - lane.bytes_before
        lane.add("tags", 0, tags)
        lane.add("log_bytes", 0, written / lane.turns)
    lane.session, lane.off_interval = Session(), None  # they hold the model


@contextmanager
def _blaming(lane: Lane) -> Iterator[None]:
    """A contender that fails is out of the race; the others go on."""
    try:
        yield
    except Exception as error:
        lane.wrong = f"it failed with {type(error).__name__}: {error}"
        with suppress(Exception):
            lane.session.sleep()
        with suppress(Exception):
            lane.session.detach()


def folder_bytes(folder: Path) -> int:
    """What lies in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def settle() -> float:
    """Wait until threads and processes that contenders have started are done with their work.

    Otherwise the one whose turn is next would pay for it. Returns the CPU time that they took.
    """
    import psutil

    # Once: to look through all processes of the machine takes longer than a short wait.
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
