"""The step schedule: plain numbers, no tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distmon.runtime.schedule import StepSchedule


def _observed(schedule: StepSchedule, steps: range) -> list[int]:
    """Complete `steps` one by one; the ones that are observed."""
    found = []
    for step in steps:
        assert schedule.coming == step or schedule.completed == 0
        schedule.advance(step)
        if schedule.is_observed:
            found.append(schedule.completed)
            schedule.started()
    return found


def test_multiples_of_the_interval_are_observed() -> None:
    assert _observed(StepSchedule(4), range(1, 13)) == [4, 8, 12]


def test_the_coming_step_is_known_to_be_observed_before_it_completes() -> None:
    schedule = StepSchedule(3)
    expected = []
    for _ in range(7):
        expected.append(schedule.coming_is_observed)
        schedule.advance(None)
        if schedule.is_observed:
            schedule.started()
    assert expected == [False, False, True, False, False, True, False]


def test_only_the_first_step_of_a_process_is_the_first() -> None:
    schedule = StepSchedule(10)
    assert [schedule.advance(None) for _ in range(3)] == [True, False, False]
    assert schedule.begun


def test_a_trainer_that_counts_from_another_number() -> None:
    schedule = StepSchedule(10)
    schedule.advance(37)
    assert schedule.next_observation == 40
    assert schedule.coming == 38


def test_the_stride_of_a_trainer_that_counts_by_five() -> None:
    schedule = StepSchedule(20)
    for step in (5, 10, 15):
        schedule.advance(step)
    assert schedule.coming == 20
    assert schedule.coming_is_observed


def test_a_trainer_that_counts_from_zero() -> None:
    schedule = StepSchedule(4)
    assert _observed(schedule, range(13)) == [4, 8, 12]
    assert (schedule.completed, schedule.counted) == (12, 13)


def test_a_number_that_is_repeated_is_a_step_of_its_own() -> None:
    schedule = StepSchedule(4)
    for step in (1, 2, 2, 3):
        schedule.advance(step)
    assert (schedule.completed, schedule.coming, schedule.counted) == (3, 4, 4)


def test_a_longer_interval_keeps_round_numbers() -> None:
    schedule = StepSchedule(10)
    _observed(schedule, range(1, 34))
    schedule.change_interval(50)
    assert schedule.next_observation == 50
    assert _observed(schedule, range(34, 101)) == [50, 100]


def test_tasks_have_a_turn_of_their_own_once_per_step() -> None:
    schedule = StepSchedule(100, task_interval=2)
    turns = []
    for _ in range(6):
        turns.append(schedule.take_task_turn())
        assert not schedule.take_task_turn()
        schedule.advance(None)
    assert turns == [False, True, False, True, False, True]


def test_tasks_have_no_turn_in_the_first_step_of_a_process() -> None:
    assert not StepSchedule(100, task_interval=1).take_task_turn()


def test_state_continues_the_count() -> None:
    schedule = StepSchedule(10)
    _observed(schedule, range(1, 24))
    resumed = StepSchedule(10)
    resumed.load_state_dict(schedule.state_dict())
    assert (resumed.completed, resumed.next_observation) == (23, 30)
    assert resumed.steps_since_observation == 3
    assert resumed.advance(None)


@pytest.mark.parametrize("given", [True, False, torch.tensor(True), np.bool_(False)])
def test_true_and_false_are_no_step_numbers(given: Any) -> None:
    schedule = StepSchedule(interval=10)
    schedule.advance(7)
    with pytest.raises(ValueError, match="is no step number; counting on from 8"):
        schedule.advance(given)
    assert schedule.completed == 8
