"""A rank whose monitoring has ended is not waited for, whatever was being decided."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import quiet, small_model

import distmon
from distmon.errors import CollectiveError
from distmon.reduce.progress import EndWatch
from distmon.reduce.rank_wait import RankWait

FOREVER_S = 1e6
"""A rank that waited for this long would run into the time limit of the test."""
PATIENCE_S = 40.0
"""A rank that waits for its patience says so: the other one is still there, at a barrier that fails
after 60 s and would end the wait for a reason of its own."""


class _Progress:
    """The store of the job, as far as a waiting rank asks it."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def watch_end(self) -> EndWatch:
        return EndWatch(self._ask, 0.001)


def test_a_wait_is_over_when_a_rank_has_ended() -> None:
    progress: Any = _Progress(lambda: True)
    with (
        RankWait(FOREVER_S, progress, "the answer") as wait,
        pytest.raises(CollectiveError, match="the answer cannot arrive: another rank has ended"),
    ):
        wait.until(lambda: False)


def test_what_an_ended_rank_has_sent_still_arrives() -> None:
    asked = threading.Event()
    polls: list[bool] = []

    def is_there() -> bool:
        polls.append(asked.is_set())
        return sum(polls) > 3  # some polls after the end was known

    progress: Any = _Progress(lambda: asked.set() or True)
    with RankWait(FOREVER_S, progress, "the answer") as wait:
        wait.until(is_there)
    assert sum(polls) > 3


def test_a_store_that_never_answers_does_not_make_a_wait_longer() -> None:
    never, begin = threading.Event(), time.monotonic()
    progress: Any = _Progress(never.wait)
    with (
        RankWait(0.1, progress, "the answer") as wait,
        pytest.raises(CollectiveError, match=r"did not arrive within 0\.1 s"),
    ):
        wait.until(lambda: False)
    assert time.monotonic() - begin < 30  # the store would have taken for ever
    never.set()


def test_a_short_wait_asks_nobody() -> None:
    progress: Any = _Progress(lambda: pytest.fail("asked"))
    polls: list[int] = []
    with RankWait(FOREVER_S, progress, "the answer") as wait:
        wait.until(lambda: bool(polls) or polls.append(1))  # type: ignore
        assert wait._watch is None


def _take_in(monitor: distmon.Monitor) -> None:
    """Take in all that both ranks have launched, so that no rank has acknowledged what is new."""
    cycle = monitor.cycle
    while cycle.arrivals or cycle.decisions.in_flight:
        cycle.advance()
        cycle.decisions.receive()


def _ends_alone(rank: int, _: int, folder: str, kind: str) -> dict[str, Any]:
    """Rank 0 ends while something that it has proposed is known to rank 1 and not in effect."""
    logging.getLogger("distmon").setLevel(logging.CRITICAL)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    always = {"always": {"when": "update_ratio_max > 0", "cooldown": 0, "patience": 1}}
    options = quiet(Path(folder), interval=2, rules=always, writer="thread")
    if kind == "decision":
        options |= {"actions": {"checkpoint": "always"}, "on_checkpoint": lambda _: None}
    monitor = distmon.attach(model, optimizer, **options)
    type(monitor.cycle).patience_s = lambda _: PATIENCE_S  # type: ignore
    said: list[str] = []
    abandon = monitor.cycle.abandon
    monitor.cycle.abandon = lambda error: said.append(str(error)) or abandon(error)  # type: ignore
    steps = 0
    while steps < 40:
        steps += 1
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        monitor.step(loss=1.0)
        dist.barrier()
        if monitor.closed:
            break
        if kind == "interval" and rank == 0 and steps == 3:
            monitor.cycle.interval_change.wanted = 4
        _take_in(monitor)
        change = monitor.cycle.decisions if kind == "decision" else monitor.cycle.interval_change
        known = torch.tensor(int(change._proposals.known is not None))
        dist.broadcast(known, src=1)
        if known and rank == 0:
            ranks = monitor.cycle.observer.ranks
            for channel in (ranks.decisions, ranks.observations, ranks.searches):
                channel._local = False  # connections stay open, as while a collective runs
            monitor.lifetime.end_monitoring(CollectiveError("planted"))
        if known:
            break
    # Rank 1 trains on without rank 0, until it knows.
    while not monitor.closed and steps < 80:
        steps += 1
        optimizer.step()
        monitor.step(loss=1.0)
    monitor.close()
    return {"said": said, "steps": steps}


@pytest.mark.parametrize("kind", ["decision", "interval"])
def test_no_step_waits_for_a_rank_that_has_ended(tmp_path: Path, kind: str) -> None:
    # With `transport: device` a rank that observes waits for all others, as NCCL does.
    ended, other = run_ranks(_ends_alone, 2, str(tmp_path), kind, strict=False)
    assert ended["said"] == ["planted"]
    assert len(other["said"]) == 1
    assert other["said"][0].endswith("cannot arrive: another rank has ended")
    assert other["steps"] < 80
