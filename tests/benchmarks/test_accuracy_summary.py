"""Summaries, goals and files, from readings made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.accuracy.goals import Verdict, verdicts
from benchmarks.accuracy.readings import (
    TOTAL,
    Reading,
    read_conditions,
    read_csv,
    write_csv,
)
from benchmarks.accuracy.step_truth import QUANTITIES
from benchmarks.accuracy.summary import Summary
from benchmarks.accuracy.tables import markdown

PLACE = ("gpt2", "fp32", 64, "start")


def total(estimate: float, mode: str = "1024", family: str = "gpt2", step: int = 1) -> Reading:
    place = (family, *PLACE[1:], mode, step)
    return Reading(*place, TOTAL, TOTAL, 10, "grad_norm", 1.0, estimate, 0.01)


def norms(
    estimate: float, stderr: float, mode: str = "1024", kind: str = "matrix"
) -> list[Reading]:
    """All three norms of one parameter whose truth is 1."""
    return [
        Reading(*PLACE, mode, 1, "w", kind, 10, quantity, 1.0, estimate, stderr)
        for quantity in QUANTITIES
    ]


def found(readings: list[Reading], goal: str) -> Verdict:
    """The one verdict whose goal has this text."""
    (verdict,) = (v for v in verdicts(Summary(readings)) if goal in v.goal)
    return verdict


def test_errors_of_the_total_norm_by_family() -> None:
    summary = Summary([total(1.3), total(0.6, step=2), total(1.0, family="bert")])
    errors = summary.total_errors("mode", "family")
    assert errors["1024", "gpt2"].rms == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    assert errors["1024", "gpt2"].worst == pytest.approx(0.4)
    assert errors["1024", "bert"].worst == 0.0
    assert summary.families == ["gpt2", "bert"]


@pytest.mark.parametrize(("estimate", "reached"), [(1.019, True), (0.981, True), (1.021, False)])
def test_one_observation_decides_the_goal_for_the_total_norm(
    estimate: float, reached: bool
) -> None:
    readings = [*(total(1.0, step=i) for i in range(50)), total(estimate), *norms(1, 0)]
    assert found(readings, "at every observation").reached is reached


@pytest.mark.parametrize(("estimate", "reached"), [(1.07, True), (1.09, False)])
def test_the_worst_family_decides_the_rms_goal(estimate: float, reached: bool) -> None:
    readings = [*(total(1.0, step=i) for i in range(50)), total(estimate, family="lstm")]
    verdict = found([*readings, *norms(1, 0)], "rms error")
    assert verdict.reached is reached
    assert "lstm" in verdict.measured


@pytest.mark.parametrize(("missed", "reached"), [(7, True), (8, False)])
def test_the_worst_kind_decides_the_coverage_goal(missed: int, reached: bool) -> None:
    covered, wrong = norms(0.99, 0.01), norms(0.9, 0.01, kind="expert")
    fine = norms(0.99, 0.01, kind="expert")
    readings = [total(1.0), *covered * 1000, *fine * (100 - missed), *wrong * missed]
    verdict = found(readings, "grad_norm: 2 standard errors")
    assert verdict.reached is reached
    assert f"{100 - missed}.0% of 100 (expert)" in verdict.measured


def test_zero_claims_and_unknown_numbers() -> None:
    readings = [total(1.0), *norms(0.0, 0.0), *norms(math.nan, math.nan), *norms(1.0, 0.0)]
    assert found(readings, "no 0 +- 0") == Verdict(
        "2. no 0 +- 0 where the truth is not zero", "1024", "3 numbers", False
    )
    errors = Summary(readings).parameter_errors("quantity")
    assert errors["grad_norm",].unknown == 1
    assert errors["grad_norm",].worst == math.inf
    assert errors["grad_norm",].bars == 1


def test_unknown_everywhere_does_not_reach_the_coverage_goal() -> None:
    readings = [total(1.0), *norms(math.nan, math.nan)]
    assert not found(readings, "grad_norm: 2 standard errors").reached
    readings = [total(1.0), *norms(1.0, 0.0)]
    assert found(readings, "grad_norm: 2 standard errors").reached


def test_which_goals_apply_to_which_mode() -> None:
    modes = ("auto", "sampled", "exact", "64")
    readings = [r for mode in modes for r in (total(1.0, mode), *norms(1, 0, mode))]
    sets = {(v.mode, v.goal[0]) for v in verdicts(Summary(readings))}
    expected = {("auto", "1"), ("sampled", "2"), ("exact", "1"), ("64", "1"), ("64", "2")}
    assert sets == expected


def test_csv_keeps_every_number_and_the_conditions(tmp_path: Path) -> None:
    readings = [total(1 / 3), *norms(math.nan, math.inf)]
    path = tmp_path / "readings.csv"
    write_csv(path, readings, {"torch": "2.13", "commit": "abc"})
    assert list(map(repr, read_csv(path))) == list(map(repr, readings))
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(readings)
    assert all(line.endswith("2.13,abc") for line in lines[1:])
    assert read_conditions(path) == {"torch": "2.13", "commit": "abc"}


def test_markdown_has_conditions_notes_and_verdicts() -> None:
    page = markdown(
        Summary([total(1.5), *norms(0.99, 0.01)]), {"torch": "2.13"}, ["mode x: not supported"]
    )
    assert "torch 2.13" in page
    assert "mode x: not supported" in page
    assert "| 1024 | gpt2 | 50.0% |" in page
    assert "50.00% (gpt2) | MISSED |" in page
