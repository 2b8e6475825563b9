from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_training import NOTHING_RIGHT, TINY_GPT, TINY_MATRICES, begin, contender

from benchmarks.contenders import CONTENDERS
from distmon.bench import training
from distmon.bench.contender import NONE, Contender, Session
from distmon.bench.contenders import GRADIENT_NORMS, NAIVE_CLONE
from distmon.bench.counting import count
from distmon.bench.interleaved import Lane, Rounds, race
from distmon.bench.training import Training


def _race(
    run: Training, racing: list[Contender], folder: Path, rounds: Rounds, **options: Any
) -> list[Lane]:
    """Without waiting for idle threads."""
    return race(run, racing, folder, rounds, settle=lambda: 0.0, **options)


def _by_name(lanes: list[Lane]) -> dict[str, Lane]:
    return {lane.contender.name: lane for lane in lanes}


def test_all_contenders_race_and_are_right(tmp_path: Path) -> None:
    racing = [c for c in CONTENDERS if c.unavailable() is None]
    lanes = _by_name(_race(begin(), racing, tmp_path, Rounds(2)))
    assert {name: lane.failed for name, lane in lanes.items() if lane.failed} == {}
    assert {name: lane.check.wrong for name, lane in lanes.items() if lane.check.wrong} == {}
    for name, lane in lanes.items():
        measures = {found.measure for found in lane.found}
        assert ("step" if name == "none" else "observation") in measures
        assert [f.round for f in lane.found if f.measure in ("step", "observation")] == [0, 1]
    tensors = len([*TINY_GPT.build().parameters()])
    tags = {n: f.value for n, lane in lanes.items() for f in lane.found if f.measure == "tags"}
    assert tags["wandb.watch"] == tags["tensorboard"] == 2 * tensors + 1
    assert tags["olmo style"] == 12 * tensors + 1
    assert tags["distmon sampled"] < tensors * 2
    written = {f.measure: f.value for f in lanes["distmon sampled"].found}
    assert written["log_bytes"] > 1000
    assert written["hooks"] > 0
    assert written["unobserved_step"] > 0


def test_a_disabled_session_does_nothing(tmp_path: Path) -> None:
    run = begin()
    run.step(Session())
    bare = count(lambda: run.step(Session()))
    sessions = [
        c.attach(run.model, run.optimizer, tmp_path / c.name)
        for c in CONTENDERS
        if c.unavailable() is None
    ]
    for session in sessions:
        run.step(session)
        off = session.unobserved()
        if off is not None:
            run.step(off)
    assert count(lambda: run.step(Session())) == bare
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


def test_a_failing_contender_leaves_and_a_wrong_one_is_marked(tmp_path: Path) -> None:
    racing = [
        NONE,
        contender("fails", Fails(at=2)),
        contender("wrong", NOTHING_RIGHT, finds=("grad",)),
        GRADIENT_NORMS,
    ]
    found = _by_name(_race(begin(), racing, tmp_path, Rounds(2)))
    assert found["fails"].failed == "ValueError: no more"
    assert "not 1e+09" in str(found["wrong"].check.wrong)
    assert [f.round for f in found["wrong"].found if f.measure == "observation"] == [0, 1]
    assert (found["foreach_norm"].failed, found["foreach_norm"].check.wrong) == (None, None)
    assert found["foreach_norm"].steps == 4


class Notes(Session):
    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def before_step(self) -> None:
        self._order.append(self._name)


def test_everybody_begins_a_round_once(tmp_path: Path) -> None:
    order: list[str] = []
    racing = [NONE, *(contender(name, Notes(name, order)) for name in "ab")]
    _race(begin(TINY_MATRICES), racing, tmp_path, Rounds(3))
    rounds = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert rounds == [["b", "a"], ["a", "b"], ["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_slow_one_gets_three_rounds(tmp_path: Path) -> None:
    racing = [NONE, NAIVE_CLONE]
    lanes = _race(begin(TINY_MATRICES), racing, tmp_path, Rounds(6, limit_s=0.0))
    slow = _by_name(lanes)["naive clone"]
    assert [f.round for f in slow.found if f.measure == "observation"] == [0, 1, 2]
    assert slow.failed is None


def test_a_long_race_has_three_rounds(tmp_path: Path) -> None:
    done: list[None] = []
    racing, rounds = [NONE, NAIVE_CLONE], Rounds(6, race_limit_s=0.0)
    run = begin(TINY_MATRICES)
    lanes = _race(run, racing, tmp_path, rounds, advance=lambda: done.append(None))
    for lane in lanes:
        assert {f.round for f in lane.found if f.measure in ("step", "observation")} == {0, 1, 2}
    assert len(done) == 6 + 2


class Takes(Session):
    """Takes a second before the step, two after it, and some in a hook."""

    def __init__(self, clock: SimpleNamespace, hook: float, timed: bool) -> None:
        self._clock, self._hook, self._timed = clock, hook, timed

    def enable(self) -> None:
        self._clock.backward = self._hook

    def before_step(self) -> None:
        self._clock.now += 1

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002
        self._clock.now += 2

    def disable(self) -> None:
        self._clock.backward = 0.0
        self._clock.now += 1000  # not timed

    def hook_seconds(self) -> float:
        return self._hook if self._timed else 0.0


def test_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, backward=0.0)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run = begin(TINY_MATRICES)
    inner = run.loss

    def loss() -> torch.Tensor:
        clock.now += 10 + clock.backward
        return inner()

    run.loss = loss
    racing = [
        NONE,
        contender("directly", Takes(clock, 0.25, timed=True)),
        contender("whole", Takes(clock, 0.5, timed=False), timing="whole step"),
    ]
    lanes = _by_name(_race(run, racing, tmp_path, Rounds(2)))

    def values(name: str, measure: str) -> list[float]:
        return [f.value for f in lanes[name].found if f.measure == measure]

    assert values("none", "step") == [10.0, 10.0]
    assert values("directly", "observation") == [3.25, 3.25]
    assert values("directly", "hooks") == [0.25, 0.25]
    assert values("whole", "observation") == [3.5, 3.5]
