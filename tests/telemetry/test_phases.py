"""Steps cut into phases, and the rank that holds up the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from distmon.telemetry.phases import OWN, PHASES, STEPS, HostMark, PhaseClock, mark_forward
from distmon.telemetry.stragglers import find_stragglers


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def mark(self) -> HostMark:
        return HostMark(self)


@pytest.fixture
def hand() -> Hand:
    return Hand()


def _one_step(clock: PhaseClock, hand: Hand, data: float = 1.0, micro: int = 1) -> None:
    hand.at += data
    for _ in range(micro):
        clock.enter("forward")
        hand.at += 2
        clock.enter("backward")
        hand.at += 4
    clock.enter("optimizer")
    hand.at += 0.5
    clock.enter("other")
    hand.at += 0.25


def _phases(clock: PhaseClock) -> dict[str, float]:
    told = clock.take()
    return {phase: told[f"{phase}_seconds"] for phase in PHASES}


def test_the_floor_is_what_nearly_every_step_takes(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 9)
    for data in (9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 5.0):  # a machine that others use too
        _one_step(clock, hand, data)
        clock.step_done(1, 9)
    told = clock.take()
    assert (told["data_floor_seconds"], told["data_seconds"]) == (3.0, 5.5)


def test_every_second_of_a_step_belongs_to_one_phase(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 10)
    for step in range(1, 10):
        _one_step(clock, hand, micro=2)
        clock.step_done(step + 1, 10)
    assert _phases(clock) == {
        "data": 1,
        "forward": 4,
        "backward": 8,
        "optimizer": 0.5,
        "other": 0.25,
    }
    assert clock.take() == {}


def test_one_slow_step_says_nothing_about_the_others(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 5)
    for data in (1.0, 100.0, 1.0, 1.0):  # a checkpoint was written before the second
        _one_step(clock, hand, data)
        clock.step_done(1, 5)
    assert clock.take()["data_seconds"] == 1


def test_only_the_steps_before_an_observation_are_cut(hand: Hand) -> None:
    marks = 0

    def mark() -> HostMark:
        nonlocal marks
        marks += 1
        return hand.mark()

    clock = PhaseClock(mark)
    for step in range(1, 1000 - STEPS):
        _one_step(clock, hand)
        clock.step_done(step + 1, 1000)
    assert marks <= 1
    for step in range(1000 - STEPS, 1000):
        _one_step(clock, hand)
        clock.step_done(step + 1, 1000)
    assert clock.take()["forward_seconds"] == 2


def test_the_user_may_say_what_it_is(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 2)
    hand.at += 1
    with clock.told("other"):
        hand.at += 10
        clock.enter("forward")  # a teacher's forward in a hook: not ours
    hand.at += 1
    clock.enter("forward")
    hand.at += 2
    clock.step_done(2, 2)
    assert _phases(clock) == {"data": 2, "forward": 2, "backward": 0, "optimizer": 0, "other": 10}


def test_the_model_tells_forward_and_evaluation_apart(hand: Hand) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hand.at += 3
            return x

    model = Slow()
    clock = PhaseClock(hand.mark)
    handles = mark_forward(model, clock)
    clock.step_done(1, 2)
    with torch.no_grad():
        model(torch.ones(1))
    hand.at += 5  # the rest of the evaluation
    model(torch.ones(1))
    hand.at += 1
    clock.step_done(2, 2)
    assert _phases(clock) == {"data": 0, "forward": 3, "backward": 1, "optimizer": 0, "other": 8}
    for handle in handles:
        handle.remove()
    assert not model._forward_hooks


def _ranks(world: int, noise: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Ranks that meet in backward: whoever is early waits there."""
    rng = np.random.default_rng(seed)
    base = {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.02, "other": 0.0}
    rows = {
        f"{p}_seconds": base[p] * (1 + noise * np.abs(rng.standard_normal(world))) for p in PHASES
    }
    return rows | {f"{p}_floor_seconds": 0.9 * rows[f"{p}_seconds"] for p in OWN}


def _slow(ranks: dict[str, np.ndarray], rank: int, phase: str, by: float) -> None:
    ranks[f"{phase}_seconds"][rank] += by
    ranks[f"{phase}_floor_seconds"][rank] += by
    others = np.arange(len(ranks["data_seconds"])) != rank
    ranks["backward_seconds"][others] += by


@pytest.mark.parametrize("world", [2, 4, 1024])
@pytest.mark.parametrize("phase", ["data", "forward", "optimizer"])
def test_the_slow_rank_is_named_and_the_waiting_ones_are_not(world: int, phase: str) -> None:
    ranks = _ranks(world, noise=0.02)
    slow = 1 if world == 2 else world // 2 + 1
    _slow(ranks, slow, phase, 0.1)
    (found,) = find_stragglers(ranks, share=0.1, sigmas=4)
    assert (found.rank, found.phase) == (slow, phase)
    assert found.waiting == tuple(r for r in range(world) if r != slow)
    assert found.excess_seconds == pytest.approx(0.1, rel=0.1)


def test_a_rank_that_comes_early_and_waits_is_not_slow() -> None:
    """Ranks that share their weights meet in forward; the fast loader waits there."""
    ranks = _ranks(8)
    ranks["data_seconds"] += 0.1
    ranks["data_seconds"][3] -= 0.1
    ranks["forward_seconds"][3] += 0.1
    ranks["forward_floor_seconds"][3] += 0.1
    assert find_stragglers(ranks, share=0.1, sigmas=4) == []


def test_ordinary_noise_names_nobody() -> None:
    for seed in range(200):
        assert find_stragglers(_ranks(4, 0.1, seed), share=0.1, sigmas=4) == []
    busy = _ranks(4)
    busy["forward_seconds"][1] += 0.2  # in more than half of the steps, but not in nearly all
    assert find_stragglers(busy, share=0.1, sigmas=4) == []
    silent = {f"{p}_seconds": np.zeros(8) for p in PHASES}
    assert find_stragglers(silent, share=0.1, sigmas=4) == []
