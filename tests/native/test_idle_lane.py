"""Steps between observations: counted in compiled code as by the monitor's own methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distmon
from distmon import Monitor
from distmon.collect.telemetry import model_hooks
from distmon.metrics import PHASES
from distmon.native import NativeModule
from distmon.runtime.idle_lane import CompiledLane, PythonLane
from distmon.runtime.step_completion import StepCompletion
from distmon.runtime.worker import EvaluationWorker

INTERVAL = 50
"""Long enough for steps in which no phase is measured."""
TIMES = ("seconds", "time", "tokens_per", "samples_per", "cost", "mfu", "fraction", "overhead")


def attach(folder: Path, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, Monitor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    settings: dict[str, Any] = {"interval": INTERVAL, "first_observation": INTERVAL, "budget": None}
    settings |= {"writer": "thread"} | more
    monitor = distmon.attach(model, optimizer, run_dir=folder, sinks=[], rules={}, **settings)
    assert isinstance(monitor, Monitor)
    return model, optimizer, monitor


def train(
    folder: Path,
    backend: str,
    steps: int,
    arguments: Callable[[int, torch.Tensor], dict[str, Any]],
    spoil: Callable[[int, Monitor], None] = lambda *_: None,
) -> tuple[Monitor, list[dict[str, Any]]]:
    """Return the monitor, closed, and the metrics of its records."""
    model, optimizer, monitor = attach(folder, backend=backend)
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        spoil(step, monitor)
        optimizer.step()
        monitor.step(**arguments(step, loss.detach()))
        if step % INTERVAL == 0:
            record = monitor.last_record
            assert record is not None
            found.append({**record.metrics, "losses": record.losses, "step": record.step})
    monitor.close()
    return monitor, found


def same(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not any(word in name for word in (*TIMES, "memory", "rss", "monitor/")):
                assert value == pytest.approx(other[name], nan_ok=True, rel=1e-9), name


ARGUMENTS: dict[str, Callable[[int, torch.Tensor], dict[str, Any]]] = {
    "a tensor": lambda _, loss: {"loss": loss},
    "numbers": lambda _, loss: {"loss": loss.item(), "tokens": 4, "samples": 4.0, "lr": 0.05},
    "its own step numbers": lambda step, loss: {"loss": loss, "step": step, "grad_norm": 2.5},
    "bf16, and none in between": lambda step, loss: (
        {"loss": loss.bfloat16()} if step % 3 else {"tokens": torch.tensor(7.0)}
    ),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", [*ARGUMENTS])
def test_records_are_the_same_with_and_without_it(kind: str, tmp_path: Path) -> None:
    lane, mine = train(tmp_path / "a", "native", 2 * INTERVAL, ARGUMENTS[kind])
    none, theirs = train(tmp_path / "b", "torch", 2 * INTERVAL, ARGUMENTS[kind])
    assert isinstance(lane.lane, CompiledLane)
    assert type(none.lane) is PythonLane
    same(mine, theirs)
    assert mine[-1]["losses"].keys() == theirs[-1]["losses"].keys()


@pytest.mark.usefixtures("native")
def test_idle_steps_call_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    # Other tests of this process may have compiled something.
    monkeypatch.setattr(model_hooks, "something_was_compiled", lambda: False)
    for name in ("before_step", "after_step", "check", "step"):
        own = getattr(Monitor, name)

        def counted(*args: Any, _own: Any = own, _name: str = name, **named: Any) -> None:
            calls.append(_name)
            _own(*args, **named)

        monkeypatch.setattr(Monitor, name, counted)
    model, optimizer, monitor = attach(tmp_path, interval=100, first_observation=100)
    for step in range(1, 61):
        with monitor.phase("data"):
            optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        monitor.check(grad_norm=1.0)
        optimizer.step()
        monitor.step(loss=loss)
        if step == 1:
            calls.clear()
    assert calls == []
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert monitor.schedule.completed == 60
    steps, _, _ = monitor.cycle.observer.losses.take()
    assert steps[-60:] == [*range(1, 61)]
    monitor.close()


@pytest.mark.usefixtures("native")
def test_hooks_begin_no_phase_in_one_that_the_trainer_has_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    own = Monitor.step
    monkeypatch.setattr(
        Monitor, "step", lambda self, **given: (steps.append(given["step"]), own(self, **given))
    )
    model, optimizer, monitor = attach(tmp_path)
    for step in range(1, INTERVAL + 1):
        with monitor.phase("data"):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
        monitor.step(step=step)
    record = monitor.last_record
    assert record is not None
    phases = {name: record.ranks[f"{name}_seconds"][0] for name in PHASES}
    assert {name for name, seconds in phases.items() if seconds > 0} == {"data", "other"}
    assert len(steps) < 10  # the others were counted by the lane, phases and all
    monitor.close()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("how", ["loss", "norm", "check"])
def test_a_nan_is_noticed_in_the_step_that_has_it(how: str, tmp_path: Path) -> None:
    nan = torch.tensor(math.nan)

    def arguments(step: int, loss: torch.Tensor) -> dict[str, Any]:
        if step == 7 and how != "check":
            return {"loss": nan} if how == "loss" else {"loss": loss, "grad_norm": nan}
        return {"loss": loss}

    seen: list[tuple[int, int]] = []

    def spoil(step: int, monitor: Monitor) -> None:
        if step == 7 and how == "check":
            monitor.check(grad_norm=math.nan)
        if step == 8:
            evidence = monitor.finite_watch.evidence
            assert evidence is not None
            seen.append((evidence.step, evidence.counted_at))

    train(tmp_path, "native", 10, arguments, spoil)
    assert seen == [(7, 7)]


@pytest.mark.usefixtures("native")
def test_skipped_steps_and_odd_arguments_are_left_to_python(tmp_path: Path) -> None:
    found = {}
    for backend in ("native", "torch"):
        model, optimizer, monitor = attach(tmp_path / backend, backend=backend)
        for step in range(1, 19):
            model(torch.ones(2, 6)).sum().backward()
            if step % 6:
                optimizer.step()
            odds: list[Any] = [{}, {"loss": "high"}, {"step": -4}, {"tokens": None}, {"loss": [1]}]
            monitor.step(**odds[step % 5])
        assert monitor.schedule.completed == 18
        fields, _ = monitor.finite_watch.take()
        found[backend] = fields
        monitor.close()
        monitor.step(loss=1.0)
        assert monitor.schedule.completed == 18
    assert found["native"] == pytest.approx(found["torch"], nan_ok=True)
    assert found["native"]["skipped_steps"] > 0


def test_what_it_is_made_with_is_checked(native: NativeModule) -> None:
    with pytest.raises(ValueError, match="each of the five entries"):
        native.idle_lane((), 1, 8, 4, 0, 1)
    with pytest.raises(TypeError):
        native.idle_lane(None, 1, 8, 4, 0, 1)  # type: ignore[arg-type]
    called: list[Any] = []
    calls = tuple(lambda *a, i=i, **n: called.append((i, a, n)) for i in range(5))
    lane: Any = native.idle_lane(calls, 1, 4, 4, 0, 1)
    lane.before_step("optimizer", (), {})
    lane.step(loss=1.0)
    assert called == [(0, ("optimizer",), {}), (3, (), {"loss": 1.0})]
    lane.open_until(10, 1, 100, True, False, math.nan)
    for _ in range(6):
        lane.after_step(None)
        lane.step(loss=2.0)
    # Of more steps than it has room for, the others are passed on.
    assert [call for call in called[2:] if call[0] == 3] == [(3, (), {"loss": 2.0})] * 2
    taken = lane.take()
    assert taken is not None
    assert (taken["steps"], taken["losses"]) == ([11, 12, 13, 14], [2.0] * 4)
    assert lane.take() is None


def test_it_times_what_it_passes_on_from_the_call_to_the_return(native: NativeModule) -> None:
    def passed_on(*_: object, loss: float = 0.0) -> None:
        time.sleep(0.02 + 0.0 * loss)

    lane: Any = native.idle_lane((passed_on,) * 5, 1, 64, 3, 4, 5)
    lane.before_step(None)  # it is not open
    lane.step(loss=1.0)
    seconds, idle = lane.take_call_seconds()
    assert seconds >= 0.04 > idle == 0.0
    assert lane.take_call_seconds() == (0.0, 0.0)
    lane.open_until(0, 1, 3, False, False, 0.0)
    lane.step()
    assert lane.take_call_seconds() == (0.0, 0.0)
    lane.step()  # prepares the one at the limit
    assert lane.take_call_seconds()[0] >= 0.02


def test_a_call_that_is_idle_is_also_timed_apart(native: NativeModule) -> None:
    def passed_on(*_: object) -> None:
        lane.call_is_idle()

    lane: Any = native.idle_lane((passed_on, print, print, print, print), 1, 64, 3, 4, 5)
    lane.before_step(None)
    lane.check()
    seconds, idle = lane.take_call_seconds()
    assert seconds > idle > 0


def test_a_call_within_another_one_counts_once(native: NativeModule) -> None:
    """A function of the user's that an observed step calls may call the monitor."""

    def checked(*_: object, **__: object) -> None:
        lane.call_is_idle()
        time.sleep(0.02)

    def stepped(*_: object) -> None:
        lane.check(grad_norm=1.0)

    lane: Any = native.idle_lane((print, print, checked, stepped, print), 1, 64, 3, 4, 5)
    begin = time.perf_counter()
    lane.step()
    passed = time.perf_counter() - begin
    seconds, idle = lane.take_call_seconds()
    assert 0.02 <= seconds <= passed
    assert idle == 0.0
    lane.check(grad_norm=1.0)
    assert lane.take_call_seconds()[1] >= 0.02


def test_what_it_counts_is_settled_also_after_ctrl_c_as_it_opens(
    native: NativeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del native
    model, optimizer, monitor = attach(tmp_path)
    parts = monitor.parts

    def one_step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)

    with monitor:
        lane: Any = parts.telemetry.phases.lane
        one_step()  # the first one is the monitor's own

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(lane, name)

            def open_until(self, *arguments: Any) -> None:
                lane.open_until(*arguments)
                raise KeyboardInterrupt

        monitor.lane.settle()
        monkeypatch.setattr(monitor.lane, "_lane", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            monitor.lane.open()
        for _ in range(3):
            one_step()
        assert parts.schedule.completed == 1
        monitor.lane.settle()
        assert parts.schedule.completed == 4


def test_it_adds_up_the_phases_of_the_newest_steps(native: NativeModule) -> None:
    lane: Any = native.idle_lane((print,) * 5, 1, 64, 3, 4, 5)
    with pytest.raises(ValueError, match="no such phase"):
        native.idle_lane((print,) * 5, 1, 64, 3, 4, 99)
    begin = time.perf_counter()
    lane.open_until(0, 1, 100, True, True, begin)
    with pytest.raises(ValueError, match="no such phase"):
        lane.mark(8)
    for step in range(5):
        assert lane.mark(1)
        time.sleep(0.05 if step == 3 else 0.0)
        lane.before_step(None)
        lane.after_step(None)
        lane.step()
    lane.mark(2)
    taken = lane.take()
    steps, spent, phase, since = taken["phases"]
    now = time.perf_counter()
    assert (len(steps), phase) == (3, 2)
    assert steps[1][1] >= 0.05
    assert all(step[i] > 0 for step in steps for i in (1, 4, 5))
    assert all(step[i] == 0 for step in steps for i in (0, 2, 3, 6, 7))
    assert [i for i, seconds in enumerate(spent) if seconds] == [5]
    assert sum(map(sum, steps)) + sum(spent) < since - begin < now - begin


def test_steps_stay_idle_while_an_observation_is_evaluated(
    native: NativeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows from it concerns the next observation."""
    del native
    model, optimizer, monitor = attach(tmp_path)
    monkeypatch.setattr(EvaluationWorker, "busy", True)
    completed: list[int] = []
    prepared: list[int] = []
    for name, steps in (("complete", completed), ("prepare", prepared)):
        before = getattr(StepCompletion, name)

        def noted(
            self: StepCompletion, *arguments: Any, before: Any = before, steps: Any = steps
        ) -> None:
            before(self, *arguments)
            steps.append(monitor.parts.schedule.completed)

        monkeypatch.setattr(StepCompletion, name, noted)
    with monitor:
        for _ in range(3 * INTERVAL):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    assert {step for step in completed if step > INTERVAL} == {2 * INTERVAL, 3 * INTERVAL}
    # Where the phases begin to be measured, and for the observed step.
    later = [step for step in prepared if step > INTERVAL]
    assert later == [68, 99, 118, 149]
