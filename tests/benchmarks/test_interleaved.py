from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import NOTHING_RIGHT, TINY_GPT, TINY_MATRICES, begin, contender

from distmon_benchmarks import interleaved, training
from distmon_benchmarks.contenders import CONTENDERS, Session, find
from distmon_benchmarks.contenders.none import NONE
from distmon_benchmarks.counting import count
from distmon_benchmarks.interleaved import Lane, race


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "settle", lambda: 0.0)


def _by_name(lanes: list[Lane]) -> dict[str, Lane]:
    return {lane.contender.name: lane for lane in lanes}


def test_all_contenders_race_and_are_right(tmp_path: Path) -> None:
    racing = [c for c in CONTENDERS if c.unavailable() is None]
    lanes = _by_name(race(begin(), racing, tmp_path, rounds=2, limit_s=1e9))
    assert {name: lane.wrong for name, lane in lanes.items() if lane.wrong} == {}
    for name, lane in lanes.items():
        measures = {found.measure for found in lane.findings}
        assert ("step" if name == "none" else "observation") in measures
        assert [f.round for f in lane.findings if f.measure in ("step", "observation")] == [0, 1]
    tensors = len([*TINY_GPT.build().parameters()])
    tags = {n: f.value for n, lane in lanes.items() for f in lane.findings if f.measure == "tags"}
    assert tags["wandb.watch"] == tags["tensorboard"] == 2 * tensors + 1
    assert tags["olmo style"] == 12 * tensors + 1
    assert tags["distmon sampled"] < tensors * 2
    written = {f.measure: f.value for f in lanes["distmon sampled"].findings}
    assert written["log_bytes"] > 1000
    assert written["hooks"] > 0
    assert written["skipped_step"] > 0


def test_who_sleeps_does_nothing(tmp_path: Path) -> None:
    run = begin()
    run.turn(Session())
    bare = count(lambda: run.turn(Session()))
    sessions = [
        c.attach(run.model, run.optimizer, tmp_path / c.name)
        for c in CONTENDERS
        if c.unavailable() is None
    ]
    for session in sessions:
        run.turn(session)
        off = session.off_interval()
        if off is not None:
            run.turn(off)
    assert count(lambda: run.turn(Session())) == bare
    for session in sessions:
        session.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
    assert not any(p._backward_hooks for p in run.model.parameters())


class Fails(Session):
    def __init__(self, at: int) -> None:
        self._left = at

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002
        self._left -= 1
        if self._left == 0:
            raise ValueError("no more")


def test_who_fails_or_lies_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    lanes = race(
        begin(),
        [
            NONE,
            contender("fails", Fails(at=2)),
            contender("lies", NOTHING_RIGHT, finds=("grad",)),
            *find(["foreach_norm"]),
        ],
        tmp_path,
        rounds=2,
        limit_s=1e9,
    )
    found = _by_name(lanes)
    assert found["fails"].wrong == "it failed with ValueError: no more"
    assert "not 1e+09" in str(found["lies"].wrong)
    assert found["foreach_norm"].wrong is None
    assert found["foreach_norm"].turns == 4


class Notes(Session):
    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def before_step(self) -> None:
        self._order.append(self._name)


def test_everybody_begins_a_round_once(tmp_path: Path) -> None:
    order: list[str] = []
    racing = [NONE, *(contender(name, Notes(name, order)) for name in "ab")]
    race(begin(TINY_MATRICES), racing, tmp_path, rounds=3, limit_s=1e9)
    rounds = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert rounds == [["b", "a"], ["a", "b"], ["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_slow_one_gets_three_rounds(tmp_path: Path) -> None:
    lanes = race(begin(TINY_MATRICES), [NONE, *find(["naive clone"])], tmp_path, 6, limit_s=0.0)
    slow = _by_name(lanes)["naive clone"]
    assert [f.round for f in slow.findings if f.measure == "observation"] == [0, 1, 2]
    assert slow.wrong is None


def test_a_long_race_has_three_rounds(tmp_path: Path) -> None:
    done: list[None] = []
    racing = [NONE, *find(["naive clone"])]
    lanes = race(
        begin(TINY_MATRICES), racing, tmp_path, 6, 1e9, lambda: done.append(None), race_limit_s=0.0
    )
    for lane in lanes:
        assert {f.round for f in lane.findings if f.measure in ("step", "observation")} == {0, 1, 2}
    assert len(done) == 6 + 2


class Takes(Session):
    """Takes a second before the step, two after it, and some in a hook."""

    def __init__(self, clock: SimpleNamespace, hook: float, told: bool) -> None:
        self._clock, self._hook, self._told = clock, hook, told

    def wake(self) -> None:
        self._clock.backward = self._hook

    def before_step(self) -> None:
        self._clock.now += 1

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002
        self._clock.now += 2

    def sleep(self) -> None:
        self._clock.backward = 0.0
        self._clock.now += 1000  # not timed

    def hook_seconds(self) -> float:
        return self._hook if self._told else 0.0


def test_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, backward=0.0)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run = begin(TINY_MATRICES)
    inner = run._loss

    def loss() -> torch.Tensor:
        clock.now += 10 + clock.backward
        return inner()

    run._loss = loss
    racing = [
        NONE,
        contender("directly", Takes(clock, 0.25, told=True)),
        contender("whole", Takes(clock, 0.5, told=False), timing="whole step"),
    ]
    lanes = _by_name(race(run, racing, tmp_path, rounds=2, limit_s=1e9))

    def values(name: str, measure: str) -> list[float]:
        return [f.value for f in lanes[name].findings if f.measure == measure]

    assert values("none", "step") == [10.0, 10.0]
    assert values("directly", "observation") == [3.25, 3.25]
    assert values("directly", "hooks") == [0.25, 0.25]
    assert values("whole", "observation") == [3.5, 3.5]
