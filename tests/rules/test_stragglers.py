"""The rank that holds up the others is named, and those who wait for it are not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model
from torch.nn.parallel import DistributedDataParallel

import distmon
from distmon.metrics import OWN_PHASES, PHASES
from distmon.rules.stragglers import find_stragglers

BASE = {"data": 0.01, "forward": 0.1, "backward": 0.2, "communication": 0.01, "optimizer": 0.02}


def _ranks(
    world: int, noise: float = 0.0, seed: int = 0, apart: bool = True
) -> dict[str, np.ndarray]:
    """Ranks that meet in communication, which is a part of backward unless it is told `apart`."""
    rng = np.random.default_rng(seed)
    rows = {
        f"{p}_seconds": BASE.get(p, 0.0) * (1 + noise * np.abs(rng.standard_normal(world)))
        for p in PHASES
    }
    rows |= {f"{p}_floor_seconds": 0.9 * rows[f"{p}_seconds"] for p in OWN_PHASES}
    if not apart:
        rows["backward_seconds"] += rows["communication_seconds"]
        rows["communication_seconds"] = np.zeros(world)
        rows["backward_floor_seconds"] = np.full(world, np.nan)
    return rows


def _slow(ranks: dict[str, np.ndarray], rank: int, phase: str, by: float) -> None:
    meeting = "communication" if ranks["communication_seconds"].any() else "backward"
    ranks[f"{phase}_seconds"][rank] += by
    ranks[f"{phase}_floor_seconds"][rank] += by
    others = np.arange(len(ranks["data_seconds"])) != rank
    ranks[f"{meeting}_seconds"][others] += by


@pytest.mark.parametrize("world", [2, 4, 1024])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("phase", OWN_PHASES)
def test_the_slow_rank_is_named_and_the_waiting_ones_are_not(
    world: int, apart: bool, phase: str
) -> None:
    ranks = _ranks(world, noise=0.02, apart=apart)
    slow = 1 if world == 2 else world // 2 + 1
    _slow(ranks, slow, phase, 0.1)
    found = find_stragglers(ranks, share=0.1, sigmas=4)
    if phase == "backward" and not apart:
        assert found == []  # all ranks are equally long there
        return
    assert [(each.rank, each.phase) for each in found] == [(slow, phase)]
    assert found[0].waiting == tuple(r for r in range(world) if r != slow)
    assert found[0].excess_seconds == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_that_comes_early_and_waits_is_not_slow(world: int) -> None:
    """Ranks that share their weights meet in forward; the fast loader waits there."""
    ranks = _ranks(world, apart=False)
    ranks["data_seconds"] += 0.1
    ranks["data_floor_seconds"] += 0.1
    ranks["data_seconds"][1] -= 0.1
    ranks["data_floor_seconds"][1] -= 0.1
    ranks["forward_seconds"][1] += 0.1
    ranks["forward_floor_seconds"][1] += 0.1
    found = find_stragglers(ranks, share=0.1, sigmas=4)
    # Of two the slow loader is the exception, of eight the fast one, which holds up nobody.
    assert [(s.rank, s.phase, s.waiting) for s in found] == [(0, "data", (1,))][: world == 2]


def test_a_slow_rank_is_named_though_its_data_comes_first_by_chance() -> None:
    ranks = _ranks(2)
    _slow(ranks, 0, "forward", 0.1)
    ranks["data_seconds"][1] += 0.003
    (found,) = find_stragglers(ranks, share=0.1, sigmas=4)
    assert (found.rank, found.phase, found.waiting) == (0, "forward", (1,))


def test_noise_is_not_a_straggler() -> None:
    for seed in range(200):
        assert find_stragglers(_ranks(4, 0.1, seed), share=0.1, sigmas=4) == []
    busy = _ranks(4)
    busy["forward_seconds"][1] += 0.2  # in more than half of the steps, but not in nearly all
    assert find_stragglers(busy, share=0.1, sigmas=4) == []
    busy = _ranks(4)  # others use the machine too: one is hit harder, but all have better steps
    busy["forward_seconds"] = np.array([0.15, 0.15, 0.25, 0.15])
    busy["forward_floor_seconds"] = np.array([0.1, 0.1, 0.16, 0.1])
    busy["communication_seconds"] = np.array([0.11, 0.11, 0.01, 0.11])
    assert find_stragglers(busy, share=0.1, sigmas=4) == []
    silent = {f"{p}_seconds": np.zeros(8) for p in PHASES}
    assert find_stragglers(silent, share=0.1, sigmas=4) == []


def test_a_rank_that_no_rank_waits_for_is_not_a_straggler() -> None:
    """Training that does not meet in every step, as with averaged weights."""
    ranks = _ranks(4)
    ranks["forward_seconds"][2] += 0.1
    ranks["forward_floor_seconds"][2] += 0.1
    assert find_stragglers(ranks, share=0.1, sigmas=4) == []


def test_a_backward_with_waiting_in_it_is_compared_with_nothing() -> None:
    """One rank of two could not tell communication apart, as where a layer was left out."""
    ranks = _ranks(2)
    ranks["backward_seconds"][0] += ranks["communication_seconds"][0] + 0.2
    ranks["communication_seconds"][0] = 0
    ranks["backward_floor_seconds"][0] = np.nan
    assert find_stragglers(ranks, share=0.1, sigmas=4) == []


def test_records_without_phases_have_no_stragglers() -> None:
    older = {"step_seconds": np.array([0.1, 0.5]), "tokens": np.full(2, 64.0)}
    assert find_stragglers(older, share=0.1, sigmas=4) == []
    assert find_stragglers({**older, "data_seconds": np.ones(2)}, share=0.1, sigmas=4) == []


def _slow_in_backward(rank: int, _: int, folder: str) -> dict[str, Any]:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if rank == 1:
        inner = model.module[1]
        inner.register_full_backward_hook(lambda *_: time.sleep(0.05))
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=8)) as monitor:
        for step in range(1, 9):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            optimizer.zero_grad()
        record = monitor.last_record
        hooked = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
    left = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
    assert record is not None
    return {"ranks": record.ranks, "hooked": hooked, "left": left}


def test_a_rank_that_is_slow_in_backward_alone_is_named(tmp_path: Path) -> None:
    found, other = run_ranks(_slow_in_backward, 2, str(tmp_path))
    (slow,) = find_stragglers(found["ranks"], share=0.1, sigmas=4)
    assert (slow.rank, slow.phase, slow.waiting) == (1, "backward", (0,))
    assert slow.excess_seconds == pytest.approx(0.05, rel=0.5)
    assert found["ranks"]["communication_seconds"][0] > 0.03
    # Which parameter comes last was learned from the first step.
    assert (found["hooked"], found["left"], other["left"]) == (1, 0, 0)
