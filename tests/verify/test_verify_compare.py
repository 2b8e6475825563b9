"""The comparison finds and names every kind of difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmon.record.record import Record
from distmon.reduce.findings import Desync
from distmon.sampling.reading import Reading
from distmon.verify.columns import ACTIVITY_COLUMNS, COLUMNS, KINDS, SPECTRA_COLUMNS, Column
from distmon.verify.compare import Comparison, bytes_of_observation, compare
from distmon.verify.compare_inside import ESTIMATE_LIMITS
from distmon.verify.difference import Difference
from distmon.verify.expected import Expected, expect
from distmon.verify.observe import Observed, observe
from distmon.verify.parallelisms import PLAIN, Limits
from distmon.verify.workloads import load_workload

STEPS, INTERVAL = 6, 2
PARAMETER = 4  # one with a gradient, an update and a learning rate


@pytest.fixture(scope="module")
def truth() -> list[Expected]:
    return expect(load_workload(None), STEPS, INTERVAL, Reading())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(PLAIN, None, STEPS, INTERVAL, tmp_path_factory.mktemp("run"))


def _compared(truth: list[Expected], *ranks: Observed) -> Comparison:
    return compare(truth, ranks, Limits(), INTERVAL)


def _with_last(observed: Observed, record: Record) -> Observed:
    return replace(observed, records=(*observed.records[:-1], record))


def _with_column(observed: Observed, name: str, value: float) -> Observed:
    """Change one value of one parameter in the last record."""
    record = observed.records[-1]
    params = record.params
    columns = {k: v.copy() for k, v in params.columns.items()}
    percentiles = {k: v.copy() for k, v in params.percentiles.items()}
    (columns if name in columns else percentiles)[name][PARAMETER] = value
    changed = replace(params, columns=columns)
    changed.__dict__["percentiles"] = percentiles  # fill the cached property
    return _with_last(observed, replace(record, params=changed))


def test_the_monitor_of_one_process_agrees_with_plain_numpy(
    truth: list[Expected], alone: Observed
) -> None:
    found = _compared(truth, alone)
    assert found.ok, (found.problems, found.off)
    assert {d.kind for d in found.differences} == set(KINDS)
    columns = {d.column for d in found.differences}
    assert {c.name for c in COLUMNS} <= columns
    assert {f"{c.kind}: {c.name}" for c in (*ACTIVITY_COLUMNS, *SPECTRA_COLUMNS)} <= columns
    assert sum(found.sampled) == found.sample > 0
    assert found.not_compared == ()
    # The built-in model covers both values of each flag.
    last = truth[-1].columns
    assert {0.0, 1.0} == set(last["requires_grad"]) == set(last["in_optimizer"])
    assert set(last["update_expected"]) == {0.0, 1.0}
    assert len(set(last["lr"][~np.isnan(last["lr"])])) > 1


def test_every_column_of_a_record_is_compared(alone: Observed) -> None:
    params = alone.records[0].params
    assert {c.name for c in COLUMNS} == {*params.columns, *params.percentiles}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
def test_a_column_that_is_off_is_named(
    column: Column, truth: list[Expected], alone: Observed
) -> None:
    want = truth[-1].columns[column.name][PARAMETER]
    squares = [truth[-1].columns[name][PARAMETER] ** 2 for name in column.scale.split()]
    scale = np.sqrt(sum(squares)) if squares else 1.0
    limit = getattr(Limits(), column.limit) if column.limit else 0.0
    assert np.isfinite(want)
    wrong = want + scale * 2 * limit + 1e-9 * (limit == 0 or scale == 0)
    (off,) = _compared(truth, _with_column(alone, column.name, wrong)).off
    assert (off.column, off.kind) == (column.name, column.kind)
    assert (off.parameter, off.step) == (truth[-1].names[PARAMETER], STEPS)
    assert off.found == wrong
    (off,) = _compared(truth, _with_column(alone, column.name, np.nan)).off
    assert off.size == np.inf


def test_the_built_in_model_has_something_to_find_inside(truth: list[Expected]) -> None:
    inside = truth[-1].inside
    assert inside["activations"]["mixture.experts.act"]["dead_fraction"] == 6 / 48
    assert 0.1 < inside["activations"]["gate.squash"]["saturated_fraction"] < 0.9
    assert inside["attention"].keys() == {"block0.attention", "block1.attention"}
    router = inside["experts"]["mixture.router"]
    assert router["dead_fraction"] == 1 / 5
    assert 0.5 < router["diversity"] < 0.8
    assert router["experts_per_token"] == 2


@pytest.mark.parametrize(
    "column", [*ACTIVITY_COLUMNS, *SPECTRA_COLUMNS], ids=lambda c: f"{c.kind}-{c.name}"
)
def test_a_column_of_the_inside_that_is_off_is_named(
    column: Column, truth: list[Expected], alone: Observed
) -> None:
    record = alone.records[-1]
    table = record.inside[column.kind]
    row = next(name for name in table.names if name in truth[-1].inside[column.kind])
    row = "gate.squash" if column.name == "saturated_fraction" else row
    limit = max(Limits().gradients, ESTIMATE_LIMITS.get(column.name, 0.0))
    scale = truth[-1].inside[column.kind][row][column.scale] if column.scale else 1.0
    want = truth[-1].inside[column.kind][row][column.name]
    for wrong in (want + 2 * limit * abs(scale), want - 2 * limit * abs(scale)):
        values = table.columns[column.name].copy()
        values[table.names.index(row)] = wrong
        changed = replace(table, columns={**table.columns, column.name: values})
        inside = {**record.inside, column.kind: changed}
        (off,) = _compared(truth, _with_last(alone, replace(record, inside=inside))).off
        assert (off.column, off.parameter) == (f"{column.kind}: {column.name}", row)
        assert (off.step, off.found) == (STEPS, wrong)


@pytest.mark.parametrize("kind", ["activations", "attention", "experts", "spectra"])
def test_a_table_that_is_missing_is_off(kind: str, truth: list[Expected], alone: Observed) -> None:
    record = alone.records[-1]
    inside = {name: table for name, table in record.inside.items() if name != kind}
    off = _compared(truth, _with_last(alone, replace(record, inside=inside))).off
    assert {(d.kind, d.size) for d in off} == {(kind, np.inf)}


def test_a_difference_within_its_limit_is_none(truth: list[Expected], alone: Observed) -> None:
    norm = truth[-1].columns["grad_norm"][PARAMETER]
    found = _compared(truth, _with_column(alone, "grad_norm", norm * (1 + 0.9e-5)))
    assert found.ok
    worst = found.worst("gradients")
    assert worst is not None
    assert worst.size == pytest.approx(0.9e-5, rel=1e-3)
    assert not _compared(truth, _with_column(alone, "grad_norm", norm * (1 + 1.1e-5))).ok


def test_one_element_in_another_bin_is_off(truth: list[Expected], alone: Observed) -> None:
    record = alone.records[-1]
    assert record.params.grad_histogram is not None
    bins = record.params.grad_histogram.copy()
    full = int(np.argmax(bins[PARAMETER]))
    bins[PARAMETER, full] -= 1
    bins[PARAMETER, full + 1] += 1
    moved = _with_last(alone, replace(record, params=replace(record.params, grad_histogram=bins)))
    (off,) = [d for d in _compared(truth, moved).off if d.column == "grad_histogram"]
    assert off.parameter == truth[-1].names[PARAMETER]


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"losses": {5: 1.0}}, "loss"),
        ({"metrics": {"monitor/grad_norm": 1.0}}, "monitor/grad_norm"),
        ({"metrics": {"monitor/frozen_count": 7.0}}, "monitor/frozen_count"),
    ],
)
def test_numbers_over_all_parameters(
    change: dict[str, Any], column: str, truth: list[Expected], alone: Observed
) -> None:
    record = alone.records[-1]
    (key, values), *_ = change.items()
    merged: Any = {**getattr(record, key), **values}
    (off,) = _compared(truth, _with_last(alone, replace(record, **{key: merged}))).off
    assert (off.column, off.parameter) == (column, "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"faults": ("rank 1 counts steps differently",)}, "rank 1 counts steps differently"),
        ({"desync": Desync((1,), 0, ("embed.weight",), False)}, "rank 1 diverged in embed"),
        ({"applied": False}, "reports a skipped step"),
        ({"metrics": {"debug/nan_param_count": 1.0}}, "reports non-finite values"),
        ({"step": 5}, "the steps of the records on rank 0 are not [2, 4, 6]"),
    ],
)
def test_problems_that_a_record_reports(
    change: dict[str, Any], words: str, truth: list[Expected], alone: Observed
) -> None:
    record = alone.records[-1]
    if "metrics" in change:
        change = {"metrics": {**record.metrics, **change["metrics"]}}
    found = _compared(truth, _with_last(alone, replace(record, **change)))
    assert not found.ok
    assert words in found.problems[0]
    assert found.differences or "step" in change  # numbers are compared where that is possible


def _as_two(truth: list[Expected], alone: Observed) -> list[Observed]:
    """Return two ranks that each hold the whole model and send the right number of bytes."""
    nbytes = bytes_of_observation(truth[0], [alone, alone], INTERVAL)
    records = tuple(
        replace(r, metrics={**r.metrics, "performance/monitor_bytes": float(nbytes)})
        for r in alone.records
    )
    count = len(records)
    rank = replace(alone, records=records, collectives=(2,) * count, nbytes=(nbytes,) * count)
    return [rank, rank]


def test_two_equal_ranks(truth: list[Expected], alone: Observed) -> None:
    found = _compared(truth, *_as_two(truth, alone))
    assert found.ok, found.problems
    assert sum(found.sampled) == 2 * found.sample


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collectives": (2, 2, 3)}, "enters 3 collectives"),
        ({"nbytes": (1, 1, 1)}, "sends 1 bytes"),
        ({"partial": frozenset({"gate.scale"})}, "are needed"),
        ({"sampled": {}}, "not a multiple of its sample"),
    ],
)
def test_costs_and_counts(
    change: dict[str, Any], words: str, truth: list[Expected], alone: Observed
) -> None:
    first, second = _as_two(truth, alone)
    if "sampled" in change:
        change = {"sampled": {**second.sampled, "gate.scale": 5}}
    found = _compared(truth, first, replace(second, **change))
    assert not found.ok
    assert any(words in problem for problem in found.problems), found.problems


def test_ranks_with_different_records(truth: list[Expected], alone: Observed) -> None:
    first, second = _as_two(truth, alone)
    second = _with_column(second, "grad_norm", 1.0)
    (problem,) = _compared(truth, first, second).problems
    assert problem == f"step {STEPS}: grad_norm on rank 1 differs from that on rank 0"


def test_a_parameter_that_is_not_observed(truth: list[Expected], alone: Observed) -> None:
    def renamed(record: Record) -> Record:
        names = ("other", *record.params.names[1:])
        return replace(record, params=replace(record.params, names=names))

    changed = replace(alone, records=tuple(map(renamed, alone.records)))
    problems = _compared(truth, changed).problems
    assert problems[0] == "1 parameters are not observed: embed.weight"
    assert "not in the model: other" in problems[1]


def test_gradients_of_rounding_noise_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = "verify_models:key_bias"
    truth = expect(load_workload(source), STEPS, INTERVAL, Reading())
    observed = observe(PLAIN, source, STEPS, INTERVAL, tmp_path)
    assert _compared(truth, observed).not_compared == ("k.bias",)
    row = truth[-1].names.index("k.bias")
    record = observed.records[-1]
    for column in ("grad_norm", "update_norm", "grad_max", "weight_norm"):
        columns = {k: v.copy() for k, v in record.params.columns.items()}
        columns[column][row] *= 1.5
        params = replace(record.params, columns=columns)
        found = _compared(truth, _with_last(observed, replace(record, params=params)))
        assert found.ok is (column != "weight_norm")
    metrics = {**record.metrics, "monitor/update_ratio_min": 0.0}
    assert _compared(truth, _with_last(observed, replace(record, metrics=metrics))).ok


def test_a_difference_that_is_not_a_number_is_off() -> None:
    assert Difference("grad_p99", "percentiles", float("nan"), 1.0, "w", 2, 0.0, 0.0).is_off
