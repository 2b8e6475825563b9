"""Error bars are compared with the truth of all elements, on a model that is truly sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distmon.sampling.designs import gradient_samples, weight_samples
from distmon.sampling.reading import Reading
from distmon.sampling.sample import Sample
from distmon.verify.compare import compare
from distmon.verify.expected import Expected, expect
from distmon.verify.observe import Observed, observe
from distmon.verify.parallelisms import PLAIN, Limits
from distmon.verify.workloads import load_workload

STEPS, INTERVAL = 2, 2


@pytest.fixture(scope="module")
def truth() -> list[Expected]:
    return expect(load_workload(None), STEPS, INTERVAL, Reading())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("run")
    return observe(PLAIN, None, STEPS, INTERVAL, folder)


def _with_errors(observed: Observed, factor: float) -> Observed:
    """Multiply all standard errors."""
    record = observed.records[0]
    columns = {
        name: values * factor if name.endswith("_stderr") else values
        for name, values in record.params.columns.items()
    }
    params = replace(record.params, columns=columns)
    return replace(observed, records=(replace(record, params=params),))


def test_the_built_in_model_is_sampled_in_every_way() -> None:
    shapes = {n: tuple(p.shape) for n, p in load_workload(None).model.named_parameters()}
    gradients = gradient_samples([*shapes], [*shapes.values()], 0)
    updates = weight_samples([*shapes], [*shapes.values()], 1024, 0)
    # A run in some cells of every row, in every cell of some rows, and spread evenly.
    assert {"rows", "columns", "runs"} <= {*map(_way, gradients)}
    assert {"rows", "points", "runs"} <= {*map(_way, updates)}
    sampled = [s for s in (*gradients, *updates) if not s.whole]
    assert any(s.row_length % 8 and _way(s) == "rows" for s in sampled)  # a cell is shorter
    assert min(s.numel - s.count for s in sampled) > 500


def _way(sample: Sample) -> str:
    if sample.whole:
        return "whole"
    if sample.rows > 1:
        return "rows" if sample.by_lane else "columns"
    return "points" if sample.run == 1 else "runs"


def test_error_bars_cover_the_truth_of_all_elements(truth: list[Expected], alone: Observed) -> None:
    found = compare(truth, [alone], Limits(), INTERVAL)
    assert found.ok, (found.problems, found.off)
    assert found.coverage.estimated == found.coverage.samples > 40
    assert found.coverage.covered >= 0.93 * found.coverage.estimated


def test_the_truth_is_that_of_all_elements(truth: list[Expected]) -> None:
    parameters = dict(load_workload(None).model.named_parameters())
    row = truth[0].names.index("frozen.weight")
    norm = float(parameters["frozen.weight"].norm())
    assert truth[0].whole["weight_norm"][row] == pytest.approx(norm, rel=1e-12)
    assert truth[0].columns["weight_norm"][row] != pytest.approx(norm, rel=1e-6)
    assert np.isnan(truth[0].whole["grad_norm"][row])


def test_error_bars_that_are_too_narrow_are_a_problem(
    truth: list[Expected], alone: Observed
) -> None:
    found = compare(truth, [_with_errors(alone, 0.1)], Limits(), INTERVAL)
    assert [p for p in found.problems if "within 2 standard errors" in p]


def test_an_estimate_without_an_error_bar_is_named(truth: list[Expected], alone: Observed) -> None:
    found = compare(truth, [_with_errors(alone, 0.0)], Limits(), INTERVAL)
    wrong = [p for p in found.problems if "no error bar" in p]
    assert any("grad_norm of embed.tall" in p for p in wrong)
    assert not any("grad_norm of embed.weight" in p for p in wrong)  # read in full


def test_with_all_gradients_read_no_gradient_has_an_error_bar(tmp_path: Path) -> None:
    reading = Reading(whole_gradients=True)
    expected = expect(load_workload(None), STEPS, INTERVAL, reading)
    observed = observe(PLAIN, None, STEPS, INTERVAL, tmp_path, "auto")
    found = compare(expected, [observed], Limits(), INTERVAL)
    assert found.ok, (found.problems, found.off)
    assert np.nanmax(expected[0].columns["grad_norm_stderr"]) == 0
