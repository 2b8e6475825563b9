"""Rules about the inside of a model, on made-up tables."""

from __future__ import annotations

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.record.record import InsideTable, Record


def routed(step: int, load: list[float]) -> Record:
    """A record with one router, whose tokens go to two experts each."""
    share = np.array(load) / sum(load)
    entropy = -float(sum(p * np.log(p) for p in share if p > 0))
    columns = {
        "experts": float(len(load)),
        "experts_per_token": 2.0,
        "fair_tokens": 100.0,
        "diversity": float(np.exp(entropy)) / len(load),
        "load_max": len(load) * float(share.max()),
        "dead_fraction": float(np.mean(share == 0)),
    }
    table = InsideTable(("router",), {name: np.array([each]) for name, each in columns.items()})
    metrics = {"inside/expert_diversity_min": columns["diversity"]}
    return make_record(step, metrics=metrics, inside={"experts": table})


EVEN, FEW = [1.0] * 8, [1.0, 1.0, 0.01, 0.01, 0.0, 0.0, 0.0, 0.0]


def warnings(loads: list[list[float]]) -> dict[str, list[int]]:
    """Return the observations with a warning, by rule."""
    engine = make_engine()
    found: dict[str, list[int]] = {"router_collapse": [], "dead_expert": []}
    for number, load in enumerate(loads):
        for alert in alerts_of(engine, routed(10 * number, load)):
            if alert.rule in found and alert.severity == "warning":
                found[alert.rule].append(number)
    return found


def test_a_new_router_has_time_to_become_even() -> None:
    assert warnings([*[FEW] * 6, *[EVEN] * 6]) == {"router_collapse": [], "dead_expert": []}


@pytest.mark.parametrize(("loads", "at"), [([FEW] * 40, 6), ([*[EVEN] * 3, *[FEW] * 37], 4)])
def test_a_router_that_stays_or_becomes_uneven_is_named_once(
    loads: list[list[float]], at: int
) -> None:
    assert warnings(loads) == {"router_collapse": [at], "dead_expert": [at]}
