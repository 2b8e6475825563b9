"""Step numbers, and which steps are observed. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LARGEST_STEP: Final = 2**48
"""Numbers of steps travel between ranks as float64."""


class StepSchedule:
    """Step counter of the monitor: the single source of truth for the step number.

    The hooks of a step run before the `Monitor.step` that completes it, so the number of the coming
    step is predicted from the stride of the last ones.
    """

    def __init__(self, interval: int, task_interval: int = 100, first: int | None = None) -> None:
        """`first`: step of the first observation, where it is before `interval`."""
        self.interval = interval
        self._first = interval if first is None else min(first, interval)
        self.completed = 0
        """Number of the last step that is done."""
        self.next_observation = self._first_after(0)
        self.begun = False
        """Whether this process has completed a step."""
        self.counted = 0
        """How often `advance` has counted a step: a trainer may repeat a number."""
        self._stride = 1
        self._task_interval = task_interval
        self._tasks_at = 0

    @property
    def coming(self) -> int:
        """Number of the step that is running."""
        return self.completed + self._stride

    @property
    def coming_is_observed(self) -> bool:
        """Whether the step that is running is observed."""
        return self.completed + self._stride >= self.next_observation

    @property
    def is_observed(self) -> bool:
        """Whether the last completed step is observed."""
        return self.completed >= self.next_observation

    @property
    def steps_since_observation(self) -> int:
        """Completed steps that the next observation reports the losses of."""
        return self.completed - self._last_before(self.next_observation)

    def advance(self, step: int | None) -> bool:
        """Complete the next step, or `step`; return whether it is the first of this process.

        A `step` that is no step number counts as the next one, and raises a ValueError after it.
        """
        number, bad = self.completed + 1, False
        if step is not None:
            try:
                given = int(step)
                bad = _is_boolean(step) or not 0 <= given <= LARGEST_STEP
            except (TypeError, ValueError, OverflowError):
                bad = True
            number = number if bad else given
        first = self._complete(number)
        if bad:
            raise ValueError(f"step={step!r:.60} is no step number; counting on from {number}")
        return first

    def advance_anyway(self) -> None:
        """Count the next step, where `advance` failed to: the other ranks have counted it."""
        self.completed += 1
        self.counted += 1

    def _complete(self, number: int) -> bool:
        first = not self.begun
        if first and number != self.completed + 1:
            self.next_observation = self._first_after(max(0, number - 1))  # step 0 is not observed
        elif number < self.completed:  # the trainer went back, or an odd number came before
            self.next_observation = self._first_after(number)
        if not first:
            self._stride = max(1, number - self.completed)
        self.begun = True
        self.completed = number
        self.counted += 1
        return first

    @property
    def stride(self) -> int:
        """How far the last step was from the one before."""
        return self._stride

    def pass_to(self, step: int, stride: int) -> None:
        """Take in steps that were completed elsewhere, up to `step`."""
        self.completed, self._stride = step, stride

    def started(self) -> None:
        """Note that an observation of the completed step has started, and plan the next one."""
        self.next_observation = self._first_after(self.completed)

    def change_interval(self, interval: int) -> None:
        """Observe every `interval` steps from now on."""
        self.interval = interval
        self.next_observation = self._first_after(self.completed)

    def take_task_turn(self) -> bool:
        """Return whether the tasks are measured in the coming step; once per step.

        Never in the first step of the process: a static graph learns its order there.
        """
        coming = self.coming
        due = coming // self._task_interval > self.completed // self._task_interval
        if not due or not self.begun or self._tasks_at == coming:
            return False
        self._tasks_at = coming
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.completed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of `state`."""
        step = int(state["step"])
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self.completed = step
        self.next_observation = self._first_after(self.completed)

    def _first_after(self, step: int) -> int:
        following = step - step % self.interval + self.interval
        return min(following, self._first) if step < self._first else following

    def _last_before(self, step: int) -> int:
        """Return the observed step before `step`, also an observed one; 0 when there is none."""
        earlier = (step - 1) // self.interval * self.interval
        return max(earlier, self._first) if step > self._first else earlier


def _is_boolean(value: object) -> bool:
    """Return whether it is True or False, also as a tensor: no number, although `int` takes it."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
