"""Launchers: how often they launch, and what they say to wrong arguments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from row_reference import CPU, Case, poisoned_rows

from csrc_triton import sampled_stats, snapshot
from csrc_triton.address_layout import ADDRESS_COLUMNS, dtype_code
from csrc_triton.exact_stats import ExactTables, fill_exact_columns
from csrc_triton.row_layout import BINS, GROUPS, SUM_COLUMNS
from csrc_triton.sampled_stats import MAX_SLOTS_PER_GROUP, fill_sampled_rows
from csrc_triton.tables import RowOutputs, RowTables, block_width
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling import build_plan


class CountedLaunch:
    """Stands for a kernel and only counts."""

    def __init__(self, counted: Counter[str], name: str) -> None:
        self.counted, self.name = counted, name

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def launch(*_: object, **__: object) -> None:
            self.counted[f"{self.name} over {grid}"] += 1

        return launch


@pytest.mark.parametrize("count", [10, 10_000])
def test_two_launches_for_any_number_of_parameters(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    for module, name in ((snapshot, "snapshot_kernel"), (sampled_stats, "sampled_stats_kernel")):
        monkeypatch.setattr(module, name, CountedLaunch(counted, name))
    x = torch.randn(4)
    shards = [Case(x, x, x).shard(f"p{i}")[0] for i in range(count)]
    probe = TritonProbe(build_plan(shards, 8, 0, CPU), shards)
    probe.snapshot()
    probe.measure(poisoned_rows(count), torch.ones(count, dtype=torch.float64))
    assert counted == {
        f"snapshot_kernel over ({count},)": 1,
        f"sampled_stats_kernel over ({count},)": 1,
    }


def tables(rows: int = 2) -> RowTables:
    return RowTables(
        addresses=torch.zeros((rows, len(ADDRESS_COLUMNS)), dtype=torch.int64),
        starts=torch.zeros(rows, dtype=torch.int64),
        widths=torch.zeros(rows, dtype=torch.int32),
        group_counts=torch.zeros((rows, GROUPS), dtype=torch.int32),
        half_ulp=torch.zeros(rows, dtype=torch.float64),
        snapshot=torch.zeros(8),
        offset_dtype=torch.int32,
        widest=1,
    )


def outputs(rows: int = 2) -> RowOutputs:
    made = poisoned_rows(rows)
    return RowOutputs(made.sums, made.maxima, made.bins, torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"starts": torch.zeros(2, device="meta", dtype=torch.int64)}, ValueError, "on meta"),
        ({"widths": torch.zeros(2, dtype=torch.int64)}, TypeError, "widths must be torch.int32"),
        ({"half_ulp": torch.zeros(1, dtype=torch.float64)}, ValueError, "half_ulp must have shape"),
        ({"snapshot": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "float32 or float64"),
        ({"snapshot": torch.zeros(16)[::2]}, ValueError, "contiguous"),
        ({"offset_dtype": torch.int16}, TypeError, "int32 or int64"),
    ],
)
def test_tables_refuse(changed: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replace(tables(), **changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sums": torch.zeros((2, 3), dtype=torch.float64)}, "sums must have shape"),
        ({"maxima": torch.zeros((2, 4), dtype=torch.float64)}, "maxima must be"),
        ({"bins": torch.zeros((1, BINS), dtype=torch.float64)}, "bins must have shape"),
        ({"checksums": torch.zeros(2)}, "checksums must be"),
        (
            {"sums": torch.zeros((len(SUM_COLUMNS), 2), dtype=torch.float64).t()},
            "sums must be contiguous",
        ),
    ],
)
def test_outputs_are_checked_before_anything_is_launched(changed: dict, words: str) -> None:
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises((TypeError, ValueError), match=words):
        fill_sampled_rows(tables(), one, replace(outputs(), **changed), 1)
    addresses = tables().addresses
    exact = ExactTables.build([3, 4], CPU)
    with pytest.raises((TypeError, ValueError), match=words):
        fill_exact_columns(exact, addresses, one, replace(outputs(), **changed), 1, torch.float32)


def test_other_refusals() -> None:
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="applied must be"):
        fill_sampled_rows(tables(), one.float(), outputs(), 1)
    wide = replace(tables(), widest=MAX_SLOTS_PER_GROUP + 1)
    with pytest.raises(ValueError, match="more than the kernel counts"):
        fill_sampled_rows(wide, one, outputs(), 1)
    with pytest.raises(TypeError, match="not int8"):
        dtype_code(torch.int8)
    exact = ExactTables.build([3, 4], CPU, histogram=False)
    with pytest.raises(ValueError, match="without a histogram"):
        fill_exact_columns(exact, tables().addresses, one, outputs(), 1, torch.float32)
    exact = ExactTables.build([3, 4], CPU)
    with pytest.raises(TypeError, match="value_dtype"):
        fill_exact_columns(exact, tables().addresses, one, outputs(), 1, torch.bfloat16)


def test_block_width_is_a_power_of_two_that_covers_a_row() -> None:
    assert [block_width(n) for n in (0, 1, 16, 17, 100, 128, 5000)] == [
        16,
        16,
        16,
        32,
        128,
        128,
        128,
    ]
