"""What a run trains and observes, and the loop that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from .families import FAMILIES
from .observing import Observers, Training
from .readings import Reading

SEEDS_PER_RUN: Final = 1_000_000
"""Distance of the sample seeds of runs with different seeds."""
Advance = Callable[[str], None]
"""Called after each step, with a description of it."""


@dataclass(frozen=True)
class Plan:
    """What is trained and observed."""

    families: Sequence[str]
    modes: Sequence[str]
    batches: Sequence[int]
    dtypes: Sequence[str]
    observations: int
    """Observed steps per family, dtype, batch and stage."""
    training_steps: int
    """Steps on the smallest batch before the stage `trained`."""
    interval: int
    seed: int

    @property
    def steps(self) -> int:
        """All optimizer steps."""
        observed = 2 * len(self.batches) * self.observations
        return len(self.families) * len(self.dtypes) * (observed + self.training_steps)


def run(plan: Plan, advance: Advance) -> Iterator[Reading]:
    """Yield all readings."""
    sample_seeds = count(SEEDS_PER_RUN * plan.seed)
    for name in plan.families:
        for dtype in plan.dtypes:
            training = Training(FAMILIES[name], dtype, plan.seed)
            observers = Observers(training, plan.modes, plan.interval, sample_seeds)
            yield from _observe(plan, training, observers, "start", advance)
            for _ in range(plan.training_steps):
                training.step(min(plan.batches))
                advance(f"{name} {dtype}: training")
            yield from _observe(plan, training, observers, "trained", advance)


def _observe(
    plan: Plan, training: Training, observers: Observers, stage: str, advance: Advance
) -> Iterator[Reading]:
    """Observe steps with each size of batch, all from the present state, and go back to it."""
    state = training.state()
    for batch in plan.batches:
        for step in range(1, plan.observations + 1):
            yield from observers.observe(stage, batch, step)
            advance(f"{training.family.name} {training.dtype}: {stage}, {batch} tokens")
        training.restore(state)
