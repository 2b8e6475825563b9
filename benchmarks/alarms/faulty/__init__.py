"""The faulty runs of the second corpus, by what is wrong in them."""

from __future__ import annotations

from benchmarks.alarms.faulty.data import DATA, RANKS
from benchmarks.alarms.faulty.gradients import GRADIENTS
from benchmarks.alarms.faulty.parameters import STUCK, WEIGHTS
from benchmarks.alarms.faulty.training_loop import LEARNING_RATE, LOOP
from benchmarks.alarms.faulty.unmeasured import UNMEASURED

FAULTY = (
    *(*LEARNING_RATE, *LOOP, *STUCK, *WEIGHTS, *GRADIENTS),
    *(*DATA, *RANKS, *UNMEASURED),
)
