"""What is watched, and where its numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distmon
from distmon.collect.inside.catalog import UNIT_SLOTS, Catalog, spaced
from distmon.config import load_config
from distmon.errors import ConfigError
from distmon.record.inside import InsideWindow
from distmon.replay.run_folders import records_of_run
from distmon.report.series import inside
from distmon.runs.reader import read_run


def test_segments_follow_each_other_without_gaps() -> None:
    catalog = Catalog(("a", "b"), ("c",), (("r", 4), ("s", 2)), ("w",))
    assert catalog.rows_of_attention.sums == 2 * 11
    routers = [*catalog.rows_of_experts()]
    assert [begin for *_, begin in routers] == [25, 31]
    assert catalog.rows_of_matrices.sums == 35
    assert catalog.sums == 39
    assert catalog.maxima == 2 * (3 + UNIT_SLOTS) + 1


@pytest.mark.parametrize("total", [1, 5, 256, 257, 1000])
def test_spaced_units_are_different_and_in_range(total: int) -> None:
    chosen = spaced(total, 256)
    assert len({*chosen}) == len(chosen) == min(total, 256)
    assert 0 == min(chosen) <= max(chosen) < total


@pytest.mark.parametrize("given", ["all", ["all"], {"kinds": "all"}])
def test_all_is_short_for_every_kind(given: Any) -> None:
    kinds = load_config({"inside": given}, environ={}).inside.kinds
    assert kinds == ("activations", "attention", "experts", "spectra")


def test_an_unknown_kind_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="inside"):
        load_config({"inside": "gradients"}, environ={})


class Functions(nn.Module):
    """Calls functions in its code, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        x = torch.relu(self.second(x)) - 0.5
        return self.third(x.tanh()).sigmoid()


def test_calls_in_the_code_of_a_model_have_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Functions()
    with torch.no_grad():
        model.second.bias -= 100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"run_dir": tmp_path, "sinks": ["jsonl"], "interval": 1}
    with distmon.attach(model, optimizer, inside="activations", **options) as monitor:
        for _ in range(2):
            model(torch.randn(64, 8)).sum().backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    table = record.inside["activations"]
    assert "(model):relu.1" in table.names
    assert table.row("(model):relu.1")["dead_fraction"] == 1
    assert table.row("(model):relu")["dead_fraction"] == 0
    assert np.isfinite(table.row("(model):tanh")["saturated_fraction"])
    assert "(model):sigmoid" not in table.names  # what the model returns is an output
    # The same from the run folder, for replay and the report.
    run = read_run(tmp_path)
    again = records_of_run(run)[-1].inside["activations"]
    assert again.names == table.names
    for name, column in table.columns.items():
        np.testing.assert_array_equal(
            again.columns[name], np.where(np.isfinite(column), column, np.nan)
        )
    shown = inside(run.records)
    assert shown is not None
    assert shown["activations/dead_fraction"]["rows"] == len(table.names)


def test_a_unit_is_dead_after_the_whole_window() -> None:
    catalog = Catalog(("a",))
    window = InsideWindow(catalog, window=2)
    shares = []
    for active in (1.0, 0.0, 0.0, 1.0):
        sums, maxima = np.zeros(catalog.sums), np.full(catalog.maxima, -np.inf, dtype=np.float32)
        sums[0], sums[5] = 8, 4
        maxima[:3], maxima[3:5] = (1, 2, -np.inf), (active, 1)
        tables = window.tables(sums, maxima, np.zeros(1))
        shares.append(float(tables["activations"].columns["dead_fraction"][0]))
    assert shares == [0.0, 0.0, 0.5, 0.0]


def test_with_a_rank_missing_nothing_is_derived() -> None:
    catalog = Catalog(("a",))
    sums, maxima = np.ones(catalog.sums), np.ones(catalog.maxima, dtype=np.float32)
    assert InsideWindow(catalog, 3).tables(sums, maxima, np.array([0.0, 1.0])) == {}
