"""Steps cut into phases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distmon.collect.telemetry.loader_hooks import LoaderHook
from distmon.collect.telemetry.phase_hooks import install_phase_hooks
from distmon.collect.telemetry.phases import STEPS, PhaseClock
from distmon.metrics import PHASES


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def mark(self) -> float:
        return self.at


@pytest.fixture
def hand() -> Hand:
    return Hand()


def _one_step(
    clock: PhaseClock,
    hand: Hand,
    data: float = 1.0,
    micro: int = 1,
    communication: bool = True,
) -> None:
    with clock.named("data"):
        hand.at += data
    for _ in range(micro):
        clock.enter("forward")
        hand.at += 2
        clock.enter("backward")
        hand.at += 4
    if communication:
        clock.enter("communication")
    hand.at += 3
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
    assert told["backward_floor_seconds"] == 4


def test_backward_has_a_floor_only_where_communication_is_measured(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 9)
    for communication in (True, False):
        _one_step(clock, hand, communication=communication)
        clock.step_done(1, 9)
    told = clock.take()
    assert math.isnan(told["backward_floor_seconds"])
    assert told["backward_seconds"] == (4 + 4 + 3) / 2


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
        "communication": 3,
        "optimizer": 0.5,
        "other": 0.25,
    }
    assert clock.take() == {}


def test_one_slow_step_does_not_change_the_median(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 5)
    for data in (1.0, 100.0, 1.0, 1.0):  # a checkpoint was written before the second
        _one_step(clock, hand, data)
        clock.step_done(1, 5)
    assert clock.take()["data_seconds"] == 1


def test_only_the_steps_before_an_observation_are_cut(hand: Hand) -> None:
    marks = 0

    def mark() -> float:
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


def test_the_user_may_name_a_phase(hand: Hand) -> None:
    clock = PhaseClock(hand.mark)
    clock.step_done(1, 2)
    hand.at += 1
    with clock.named("other"):
        hand.at += 10
        clock.enter("forward")  # a teacher's forward in a hook: not ours
    hand.at += 1
    clock.enter("forward")
    hand.at += 2
    clock.step_done(2, 2)
    found = {phase: seconds for phase, seconds in _phases(clock).items() if seconds}
    assert found == {"forward": 2, "other": 12}  # time that belongs to nobody is no data


@pytest.mark.parametrize("failing", [2, 3], ids=["entering", "leaving"])
def test_an_error_in_a_named_phase_drops_the_step_and_does_not_reach_the_loop(
    hand: Hand, failing: int
) -> None:
    marks = 0

    def mark() -> float:
        nonlocal marks
        marks += 1
        if marks == failing:
            raise MemoryError("planted")
        return hand.mark()

    clock = PhaseClock(mark)
    clock.step_done(1, 3)  # the first mark
    with clock.named("data"):
        hand.at += 10
    with pytest.raises(MemoryError, match="planted"):
        clock.step_done(2, 3)

    def load() -> None:
        with clock.named("data"):
            hand.at += 1
            raise EOFError

    with pytest.raises(EOFError):  # of the loop itself
        load()
    clock.enter("forward")
    hand.at += 2
    clock.step_done(3, 3)
    found = {phase: seconds for phase, seconds in _phases(clock).items() if seconds}
    assert found == {"data": 1, "forward": 2}


def test_forward_and_evaluation_are_distinguished(hand: Hand) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hand.at += 3
            return x

    model = Slow()
    clock = PhaseClock(hand.mark)
    handles = [*install_phase_hooks(model, clock)]
    clock.step_done(1, 2)
    with torch.no_grad():
        model(torch.ones(1))
    hand.at += 5  # the rest of the evaluation
    model(torch.ones(1))
    hand.at += 1
    clock.step_done(2, 2)
    found = {phase: seconds for phase, seconds in _phases(clock).items() if seconds}
    assert found == {"forward": 3, "backward": 1, "other": 8}
    assert len(handles) == 2  # nothing to tell of a backward without other ranks
    for handle in handles:
        handle.remove()
    assert not model._forward_hooks


class SlowItems(Dataset[torch.Tensor]):
    """Each item takes a second of the clock."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.hand.at += 1
        return torch.ones(1)


def test_waiting_in_a_loader_is_data_and_saving_is_not(hand: Hand) -> None:
    model, original = nn.Linear(1, 1), _BaseDataLoaderIter.__next__
    clock, other_clock = PhaseClock(hand.mark), PhaseClock(hand.mark)
    hooks = [LoaderHook(clock), LoaderHook(other_clock), *install_phase_hooks(model, clock)]
    clock.step_done(1, 2)
    hand.at += 7  # a checkpoint is written
    (batch, *_) = DataLoader(SlowItems(hand), batch_size=2)
    model(batch)
    clock.step_done(2, 2)
    found = {phase: seconds for phase, seconds in _phases(clock).items() if seconds}
    assert found == {"data": 4, "other": 7}
    for hook in hooks:
        hook.remove()
    assert _BaseDataLoaderIter.__next__ is original


def test_an_evaluation_is_one_mark_however_long(hand: Hand) -> None:
    model = nn.Linear(1, 1)
    clock = PhaseClock(hand.mark)
    hooks = [LoaderHook(clock), *install_phase_hooks(model, clock)]
    clock.step_done(1, 2)
    model.eval()
    for _ in range(5):
        for batch in DataLoader(SlowItems(hand)):
            model(batch)  # with gradients enabled, as many evaluations are
    assert len(clock._spans) == 3  # other, the first batch of data, and back to other
    clock.step_done(2, 2)
    found = {phase: seconds for phase, seconds in _phases(clock).items() if seconds}
    assert found == {"data": 1, "other": 19}
    clock.stop()
    clock.step_done(3, 3)
    model.train()(torch.ones(1))
    assert not clock._spans
    for hook in hooks:
        hook.remove()
