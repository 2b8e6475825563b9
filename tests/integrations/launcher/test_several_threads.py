"""Several threads of a process that train: one is monitored, and a sentence says so."""

from __future__ import annotations

import importlib.util
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import batch, small_model
from started_scripts import records

from distmon.config import load_config
from distmon.integrations.launcher.command import BOOTSTRAP
from distmon.integrations.launcher.training_watch import TrainingWatch


class Training:
    """A loop whose steps are run by any thread."""

    def __init__(self, offset: float) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.offset = offset
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(batch(len(self.losses))).square().mean() + self.offset
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def in_thread(function: Any, name: str) -> None:
    thread = threading.Thread(target=function, name=name)
    thread.start()
    thread.join()


def train_in_turns(trainings: list[Training], steps: int) -> None:
    """Run each training in a thread of its own, a step of one after a step of the other."""
    barrier = threading.Barrier(len(trainings))

    def train(mine: int) -> None:
        for _ in range(steps):
            for turn, training in enumerate(trainings):
                if turn == mine:
                    training.step()
                barrier.wait()

    threads = [threading.Thread(target=train, args=(i,), name=f"T{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_thread_is_monitored_and_the_others_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"run_dir": tmp_path / "run", "interval": 1, "sinks": ["jsonl"], "budget": None}
    watch = TrainingWatch(load_config(settings))
    watch.begin()
    try:
        trainings = [Training(offset) for offset in (0.0, 10.0, 20.0)]
        with caplog.at_level(logging.WARNING, logger="distmon"):
            train_in_turns(trainings, steps=3)
        assert len(watch.monitors) == 1
        # A step of the same model in another thread, as a pool of threads makes it, counts.
        in_thread(trainings[0].step, "pool")
        watch.monitors[0].close()
        # Without a monitored model any thread may begin.
        later = Training(30.0)
        in_thread(later.step, "later")
        assert len(watch.monitors) == 1
    finally:
        watch.close()
    (sentence,) = [r.getMessage() for r in caplog.records if "threads" in r.getMessage()]
    assert sentence == (
        "distmon: several threads train models at the same time: those of T0 are monitored, those "
        "of the other threads are not"
    )
    for name, training in (("run", trainings[0]), ("run-model2", later)):
        found = [r["metrics"]["train/step_loss"] for r in records(tmp_path / name)]
        assert found == pytest.approx(training.losses, rel=1e-6), "no loss of another thread"


def test_optimizers_that_threads_create_at_the_same_time_are_all_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap", BOOTSTRAP / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)

    class Optimizer:
        """Stands in for that of torch."""

        def __init__(self, name: str) -> None:
            self.name = name

    noted: list[str] = []
    second = threading.Thread(target=lambda: Optimizer("second"))

    def watch() -> None:
        second.start()
        second.join(timeout=0.2)  # it waits for this function, so this ends without it
        below = Optimizer.__init__

        def noting(self: Optimizer, name: str) -> None:
            below(self, name)
            noted.append(name)

        monkeypatch.setattr(Optimizer, "__init__", noting)

    monkeypatch.setattr(bootstrap, "_watch", watch)
    bootstrap._wait_for_optimizer(SimpleNamespace(optim=SimpleNamespace(Optimizer=Optimizer)))
    assert Optimizer("first").name == "first"
    second.join()
    assert Optimizer("third").name == "third"
    assert sorted(noted) == ["first", "second", "third"]
