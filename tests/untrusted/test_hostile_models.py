"""Models and loops that nobody expects: bounded lists, names that no file can hold."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import distmon
from distmon.collect.telemetry.phases import MOST_SPANS, PhaseClock
from distmon.runs.reader import read_run


def test_a_step_that_never_ends_keeps_a_bounded_number_of_marks() -> None:
    """As an evaluation of hours, or forwards without a step: 3000 of them kept 6000 marks."""
    now = iter(range(10**9))
    clock = PhaseClock(lambda: float(next(now)))
    clock.step_done(1, 2)
    for _ in range(MOST_SPANS):
        clock.enter("forward")
        clock.enter("backward")
    assert len(clock._spans) <= MOST_SPANS
    clock.step_done(2, 3)
    assert clock.take() == {}  # the step is left out, not reported wrongly
    clock.enter("forward")
    clock.step_done(3, 4)
    assert clock.take()["forward_seconds"] > 0
    clock.stop()
    for _ in range(100):
        clock.enter("forward")
        clock.enter("backward")
    assert clock._spans == []


def test_a_name_with_a_lone_surrogate_and_an_escape_sequence(tmp_path: Path) -> None:
    model = nn.Module()
    names = ("bad\udc80", "esc\x1b[2J", "[/nope]")
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.ones(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"interval": 1, "first_observation": 1, "sinks": ["jsonl", "arrow", "console"]}
    monitor = distmon.attach(
        model, optimizer, settings, run_dir=tmp_path / "run", writer="thread", budget=None
    )
    for _ in range(2):
        loss = sum(parameter.sum() for parameter in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
    monitor.close()
    run = read_run(tmp_path / "run")
    assert run.problems == ()
    assert set(run.params["name"].to_pylist()) == {"bad\\udc80", "esc\x1b[2J", "[/nope]"}
