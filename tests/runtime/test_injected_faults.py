"""Whatever call of the monitor fails, on whichever rank: training is not touched."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_injection import Call, Injection, calls_traced
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model
from torch.nn.parallel import DistributedDataParallel

import distmon

LONGEST_STEP_S = 30.0
"""Far above the few seconds that the monitor may wait where a decision is pending, and far below
the timeout of a collective."""


class _Training:
    """A small DDP model, one step at a time."""

    def __init__(self) -> None:
        self.model = small_model()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def forward_backward(self) -> torch.Tensor:
        self.step += 1
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.wrapped(batch(self.step)).square().mean()
        loss.backward()
        return loss.detach()


def _attach(training: _Training, folder: Path) -> Any:
    # One folder for all: a hundred attempts of one run.
    return distmon.attach(
        training.wrapped, training.optimizer, **quiet(folder, interval=2, sinks=["jsonl"])
    )


def _observed_call_sites(folder: Path) -> list[Call]:
    """Every call from the hooks of an observed step until its record is there."""
    training, found = _Training(), dict[Call, None]()
    monitor = _attach(training, folder)
    for _ in range(6):
        loss = training.forward_backward()
        with calls_traced(found):
            training.optimizer.step()
            monitor.step(loss=loss, grad_norm=1.0, tokens=16)
            monitor.evaluated(val_loss=1.0)
        dist.barrier()  # the observation has arrived by the next step
    monitor.close()
    return [*found]


def _unmonitored(steps: int) -> list[float]:
    training, losses = _Training(), []
    for _ in range(steps):
        losses.append(float(training.forward_backward()))
        training.optimizer.step()
    return losses


class _Injected:
    """Counts what happened while faults were injected into the steps of one training."""

    def __init__(self, training: _Training, folder: Path) -> None:
        self._training = training
        self._folder = folder
        self.monitor = _attach(training, folder)
        self.losses: list[float] = []
        self.longest = 0.0

    def reattach(self) -> None:
        self.monitor.close()
        self.monitor = _attach(self._training, self._folder)

    def steps(self, site: Call | None, count: int) -> bool:
        """Train some steps; return whether the fault was raised."""
        injection = Injection(site)
        for _ in range(count):
            loss = self._training.forward_backward()
            begin = time.monotonic()
            with injection.armed():
                self._training.optimizer.step()
                self.monitor.step(loss=loss, grad_norm=1.0, tokens=16)
                self.monitor.evaluated(val_loss=1.0)
            self.longest = max(self.longest, time.monotonic() - begin)
            self.losses.append(float(loss))
        return injection.raised


def _most(number: int) -> int:
    """The largest number of any rank."""
    most = torch.tensor([number])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _inject_everywhere(rank: int, world: int, folder: str) -> dict[str, Any]:
    logging.getLogger("distmon").setLevel(logging.CRITICAL)
    sites = _observed_call_sites(Path(folder) / "trace")
    training = _Training()
    injected = _Injected(training, Path(folder) / "injected")
    missed, restarts = [], 0
    for number in range(_most(len(sites))):
        mine = sites[number] if number < len(sites) and number % world == rank else None
        if not injected.steps(mine, 4) and mine is not None:
            missed.append(mine)
        # A call that other ranks depend on, as launching a collective, ends the monitoring.
        if _most(injected.monitor.closed):
            injected.reattach()
            restarts += 1
    # Calls that are made in the first steps only.
    never = 0
    for number in range(_most(len(missed))):
        injected.reattach()
        never += not injected.steps(missed[number] if number < len(missed) else None, 6)
    injected.monitor.close()
    return {
        "sites": len(sites),
        "never": never,
        "restarts": restarts,
        "longest": injected.longest,
        "equal": injected.losses == _unmonitored(training.step),
    }


def test_a_fault_at_any_call_on_any_rank_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    results = run_ranks(_inject_everywhere, 2, str(tmp_path))
    for found in results:
        assert found["sites"] > 200
        # Each rank injects into half of the sites; so many of them may not be made again.
        assert found["never"] < 0.15 * found["sites"], found
        assert found["equal"]
        assert found["longest"] < LONGEST_STEP_S
