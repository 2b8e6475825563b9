"""How much is read: decided once, from the time of a pass, the interval and the budget."""

from __future__ import annotations

import pytest
import torch

from distmon.layout import capture
from distmon.probe.read_cost import gradient_read_seconds
from distmon.sampling.reading import SHORT_PASS_S, STEP_PASSES, Reading, choose_reading

DEFAULT_BUDGET = 0.001
LONG_PASS = 0.02


@pytest.mark.parametrize(
    ("interval", "budget", "seconds", "in_full"),
    [
        (100, DEFAULT_BUDGET, LONG_PASS, True),  # 1 pass in 4000: a quarter of 0.1%
        (99, DEFAULT_BUDGET, LONG_PASS, False),
        (10, 10 * DEFAULT_BUDGET, LONG_PASS, True),
        (1, DEFAULT_BUDGET, SHORT_PASS_S, True),
        (1, DEFAULT_BUDGET, 1.01 * SHORT_PASS_S, False),
        (1, None, LONG_PASS, True),
    ],
)
def test_auto_reads_gradients_in_full_where_that_fits(
    interval: int, budget: float | None, seconds: float, in_full: bool
) -> None:
    assert STEP_PASSES == 40
    reading = choose_reading("auto", budget, interval, seconds)
    assert (reading.whole_gradients, reading.whole_weights) == (in_full, False)


def test_either_can_be_forced() -> None:
    assert choose_reading("sampled", None, 10**6, 0.0) == Reading()
    exact = choose_reading("exact", DEFAULT_BUDGET, 1, LONG_PASS)
    assert exact.whole_gradients
    assert exact.whole_weights
    assert choose_reading(77, None, 10**6, 0.0) == Reading(77)
    texts = {choose_reading(size, None, 1, 0.0).text for size in ("auto", "sampled", "exact")}
    assert len(texts) == 3


def test_the_time_of_a_pass_is_measured_on_trainable_weights() -> None:
    model = torch.nn.Linear(100, 100)
    assert gradient_read_seconds(capture(model)) > 0
    model.requires_grad_(False)
    assert gradient_read_seconds(capture(model)) == 0
