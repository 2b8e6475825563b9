"""What somebody sees who calls `attach` with the defaults for the first time."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import batch, small_model, train

import distmon
from distmon.runs.run_names import new_run_path
from distmon.runtime.schedule import StepSchedule


def _train_with_defaults(steps: int, **settings: Any) -> list[str]:
    """Train and return the lines that were printed."""
    screen = io.StringIO()
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    console = Console(file=screen, width=160)
    rules = {"bad_init": {"enabled": False}, "grad_imbalance": {"enabled": False}}
    with distmon.attach(model, optimizer, console=console, rules=rules, **settings) as monitor:
        opening = screen.getvalue()
        assert "at step 10, then every 100 steps" in opening, "printed by attach itself"
        train(model, optimizer, monitor, range(1, steps + 1))
    return screen.getvalue().splitlines()


def test_fifty_steps_with_the_defaults_print_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = _train_with_defaults(50)
    assert "6 parameters" in lines[0]
    assert "run folder runs/" in lines[0]
    steps = [line.split()[0] for line in lines if line.startswith("step:")]
    assert steps == ["step:10", "step:50"]
    assert "loss:" in next(line for line in lines if line.startswith("step:50"))
    assert "distmon: 1 record, " in lines[-1]
    assert "own cost" in lines[-1]
    run = distmon.read_run("runs/latest")
    assert [*run.losses] == [*range(1, 51)], "also those after the last observation"
    assert [*run.loss_ema] == [*range(1, 51)]
    assert lines[-1].endswith(f"distmon show {Path('runs') / os.readlink('runs/latest')}")


def test_the_state_after_close_has_each_loss_once(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = distmon.attach(model, optimizer, run_dir=tmp_path / "run", sinks=["jsonl"])
    train(model, optimizer, monitor, range(1, 4))
    before = monitor.state_dict()["cycle"]
    monitor.close()
    after = monitor.state_dict()["cycle"]
    assert len(before["losses"]) == 3
    assert before["record"]["loss_ema"] is None
    assert after["losses"] == []
    assert after["record"]["loss_ema"] == distmon.read_run(tmp_path / "run").loss_ema[3]


def test_the_first_observation_is_early_and_only_once() -> None:
    schedule = StepSchedule(100, first=10)
    observed = []
    for step in range(1, 301):
        schedule.advance(step)
        if schedule.is_observed:
            observed.append((step, schedule.steps_since_observation))
            schedule.started()
    assert observed == [(10, 10), (100, 90), (200, 100), (300, 100)]
    resumed = StepSchedule(100, first=10)
    resumed.load_state_dict({"step": 150})
    assert (resumed.next_observation, resumed.steps_since_observation) == (200, 50)
    assert StepSchedule(4, first=10).next_observation == 4


def test_a_forgotten_step_is_mentioned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    parts = [[p] for p in model.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.01) for part in parts]
    with (
        caplog.at_level(logging.WARNING, "distmon"),
        distmon.attach(model, optimizers, run_dir=tmp_path / "run", sinks=[]) as monitor,
    ):
        model(batch(1)).sum().backward()

        def step_all(times: int) -> None:
            for _ in range(times):
                for optimizer in optimizers:  # one hint for many optimizers, too
                    optimizer.step()

        step_all(199)
        monitor.step(loss=1.0)
        step_all(199)
        assert "monitor.step()" not in caplog.text
        step_all(300)
    hints = [r.getMessage() for r in caplog.records if "monitor.step()" in r.getMessage()]
    assert len(hints) == 1
    assert "stepped 200 times without a call" in hints[0]


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    def now() -> datetime:
        return datetime(2026, 1, 2, 3, 4, 5)

    first = new_run_path(tmp_path, ["some/train gpt.py", "--x"], now)
    assert first == tmp_path / "train-gpt-20260102-030405"
    second = new_run_path(tmp_path, ["some/train gpt.py"], now)
    assert second.name == "train-gpt-20260102-030405-2"
    assert os.readlink(tmp_path / "latest") == second.name
    assert new_run_path(tmp_path, ["pkg/train/__main__.py"], now).name.startswith("train-")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    new_run_path(tmp_path, ["-c"], now)
    assert not (tmp_path / "latest").is_symlink(), "a folder of the user's stays"


def test_fp32_masters_are_pointed_to_the_manual_form(tmp_path: Path) -> None:
    model = small_model().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1.0)
    with pytest.raises(distmon.DistmonError, match="hooks=False"):
        distmon.attach(model, optimizer, run_dir=tmp_path / "run")
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "interval": 1, "sinks": []}
    with distmon.attach(model, hooks=False, **settings) as monitor:
        model(batch(1).to(torch.bfloat16)).float().square().mean().backward()
        monitor.before_step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        monitor.after_step()
        monitor.step(loss=1.0)
        record = monitor.last_record
    assert record is not None
    assert record.metrics["monitor/update_ratio_median"] > 0


def test_a_monitor_ends_with_its_model_but_not_with_a_list_made_for_it(tmp_path: Path) -> None:
    def attached(name: str, wrapped: bool) -> tuple[Any, torch.nn.Module, Any, Any]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = torch.nn.ModuleList([model]) if wrapped else model
        monitor = distmon.attach(given, optimizer, run_dir=tmp_path / name, sinks=["jsonl"])
        train(model, optimizer, monitor, range(1, 3))
        return monitor, model, optimizer, weakref.ref(next(model.parameters()))

    kept, _model, *_ = attached("kept", wrapped=True)
    gc.collect()
    assert not kept.closed
    monitor, *held, parameter = attached("gone", wrapped=False)
    del held
    deadline = time.monotonic() + 60
    while not (monitor.closed or time.monotonic() > deadline):
        gc.collect()
        time.sleep(0.01)
    assert monitor.closed
    for thread in threading.enumerate():
        if thread.name == "distmon-close":
            thread.join(60)
    del monitor
    gc.collect()
    assert parameter() is None
    assert [*distmon.read_run(tmp_path / "gone").losses] == [1, 2], "delivered"
    kept.close()


MODEL_IN_A_FUNCTION = """
import time, torch, distmon
from distmon.runtime import run_end

close_worker = run_end.RunEnd.close_worker

def close_slowly(self):
    time.sleep(1)
    close_worker(self)

run_end.RunEnd.close_worker = close_slowly

def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = distmon.attach(model, optimizer, interval=2, first_observation=2)
    for _ in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)

main()
"""


def test_a_process_does_not_end_while_the_monitor_of_a_model_that_is_gone_closes(
    tmp_path: Path,
) -> None:
    """The model of a script goes when its main function returns, just before the process ends."""
    printed = _printed_by(MODEL_IN_A_FUNCTION, tmp_path)
    assert "step:4" in printed
    assert "distmon: 2 records" in printed, "the summary"


DRAWN_NUMBERS = """
import random, numpy, torch

random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
import distmon

model = torch.nn.Linear(4, 1).requires_grad_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
with distmon.attach(model, optimizer, interval=1) as monitor:
    for _ in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        monitor.step()
after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
print([x == y for x, y in zip(before, after)])
"""


def test_the_random_numbers_of_a_training_are_its_own(tmp_path: Path) -> None:
    assert "[True, True, True]" in _printed_by(DRAWN_NUMBERS, tmp_path)


def _printed_by(source: str, folder: Path) -> str:
    """Run a script in a process of its own; return what it printed."""
    script = folder / "train.py"
    script.write_text(source)
    paths = [str(Path(distmon.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(":")]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout + done.stderr
