"""Goals: reached, missed, not measured, and never reached by a wrong answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_results import SECONDS, write, write_growing

from benchmarks.contenders import CONTENDERS
from benchmarks.overhead.goals import GOALS, HEADLINE, goal_section
from benchmarks.overhead.workloads import WORKLOADS
from distmon.bench.results import Case, read


def _outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    """What was measured and the outcome, by goal."""
    rows = goal_section(read(folder)).rows
    return {goal: (measured, outcome) for goal, _, measured, outcome in rows}


def test_the_headline_is_a_workload() -> None:
    assert HEADLINE[0] in {workload.name for workload in WORKLOADS}
    assert set(SECONDS) < {contender.name for contender in CONTENDERS}


def test_all_goals_are_evaluated(tmp_path: Path) -> None:
    found = _outcomes(write_growing(tmp_path))
    assert len(found) == len(GOALS) == 13
    assert {outcome for _, outcome in found.values()} == {"reached"}


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({"distmon sampled": 6e-3}, ["naive clone", "wandb.watch", "foreach_norm"]),
        ({"distmon sampled": 11e-3}, ["naive", "wandb", "foreach", "interval 1"]),
        ({"distmon exact": 0.121}, ["exact observation"]),
    ],
)
def test_a_missed_goal_is_reported(
    tmp_path: Path, seconds: dict[str, float], missed: list[str]
) -> None:
    found = _outcomes(write(tmp_path, {**SECONDS, **seconds}, noise=0.0))
    names = [goal for goal, (_, outcome) in found.items() if outcome == "missed"]
    assert len(names) == len(missed)
    for name, words in zip(names, missed, strict=True):
        assert words in name
        assert found[name][0]


def test_a_goal_that_rests_on_a_wrong_answer_is_missed(tmp_path: Path) -> None:
    found = _outcomes(write(tmp_path, noise=0.0, wrong={"distmon sampled": "a is 2, not 1"}))
    missed = {goal: text for goal, (text, outcome) in found.items() if outcome == "missed"}
    assert len(missed) == 6
    assert all(text.endswith("; answer wrong: distmon sampled") for text in missed.values())
    exact = "exact observation against one foreach_norm of weights and gradients"
    assert found[exact][1] == "reached"


def test_what_was_not_measured_has_no_outcome(tmp_path: Path) -> None:
    found = _outcomes(write(tmp_path, {"distmon sampled": 2e-3, "naive clone": 0.5}))
    absent = {goal for goal, (_, outcome) in found.items() if outcome == "not measured"}
    assert "sampled observation against wandb.watch" in absent
    assert "time for each tensor" in absent
    assert _outcomes(write(tmp_path, cases=[Case("mine", "fp32", "none", 1, 4, 99)])) == {}
