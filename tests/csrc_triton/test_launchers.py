"""Launchers: how often they launch, and what they say to wrong arguments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from row_reference import CPU, Case, poisoned_rows

from csrc_triton import exact_stats, gradient_runs, nonfinite_counts, sampled_stats, snapshot
from csrc_triton.address_layout import ADDRESS_COLUMNS, dtype_code
from csrc_triton.exact_stats import CHUNK, ExactTables, fill_exact_columns
from csrc_triton.gradient_runs import CHUNK_RUNS, RunTables, fill_run_columns
from csrc_triton.row_layout import BINS, GROUPS, SUM_COLUMNS
from csrc_triton.sampled_stats import MAX_SLOTS_PER_GROUP, fill_sampled_rows
from csrc_triton.tables import RowOutputs, RowTables, block_width
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading


class CountedLaunch:
    """Stands for a kernel and only counts."""

    def __init__(self, counted: Counter[str], name: str) -> None:
        self.counted, self.name = counted, name

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def launch(*_: object, **__: object) -> None:
            self.counted[f"{self.name} over {grid}"] += 1

        return launch


KERNELS = (
    (snapshot, "snapshot_kernel"),
    (sampled_stats, "sampled_stats_kernel"),
    (gradient_runs, "run_chunks_kernel"),
    (gradient_runs, "run_rows_kernel"),
    (exact_stats, "exact_chunks_kernel"),
    (exact_stats, "exact_rows_kernel"),
    (nonfinite_counts, "nonfinite_counts_kernel"),
)


def counted_launches(
    sizes: list[tuple[int, ...]], reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Launches of one observation of parameters of these sizes, by kernel and grid."""
    counted: Counter[str] = Counter()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, CountedLaunch(counted, name))
    tensors = {n: torch.randn(n) for n in set(sizes)}
    shards = [Case(*[tensors[n]] * 3).shard(f"p{i}")[0] for i, n in enumerate(sizes)]
    probe = TritonProbe(build_plan(shards, reading, 0, CPU), shards)
    probe.snapshot()
    probe.measure(poisoned_rows(len(sizes)), torch.ones(len(sizes), dtype=torch.float64))
    return counted


@pytest.mark.parametrize("count", [10, 10_000])
def test_two_launches_for_any_number_of_small_parameters(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counted_launches([(4,)] * count, Reading(8), monkeypatch) == {
        f"snapshot_kernel over ({count},)": 1,
        f"sampled_stats_kernel over ({count},)": 1,
    }


def test_programs_only_for_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sample has all of two, one gradient is read whole, one is sampled.
    sizes = [(4,), (4,), (100,), (449, 438)]
    assert 3 * CHUNK < 449 * 438 < 4 * CHUNK
    always = {"snapshot_kernel over (4,)": 1, "sampled_stats_kernel over (4,)": 1}
    assert CHUNK_RUNS == 4096 // 8
    assert counted_launches(sizes, Reading(8), monkeypatch) == {
        **always,
        "run_chunks_kernel over (2,)": 1,
        "run_rows_kernel over (1,)": 1,
        "exact_chunks_kernel over (1,)": 1,
        "exact_rows_kernel over (1,)": 1,
    }
    assert counted_launches(sizes, Reading(8, whole_gradients=True), monkeypatch) == {
        **always,
        "exact_chunks_kernel over (5,)": 1,
        "exact_rows_kernel over (2,)": 1,
    }
    exact = Reading(8, whole_gradients=True, whole_weights=True)
    assert counted_launches(sizes, exact, monkeypatch) == {
        **always,
        "exact_chunks_kernel over (10,)": 1,
        "exact_rows_kernel over (4,)": 1,
    }


def compiled_kinds(
    dtype: torch.dtype, bins: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[tuple[object, ...]], set[tuple[object, ...]]]:
    """Kernels and constants that are compiled at attach, and those that training launches."""
    launched: set[tuple[object, ...]] = set()

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, _: object) -> object:
            return lambda *_, **constants: launched.add((self.name, *sorted(constants.items())))

    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorded(name))
    cases = [Case(*[torch.zeros(n, dtype=dtype)] * 2, None) for n in (4, 100, (90, 100))]
    shards = [case.shard(f"p{i}")[0] for i, case in enumerate(cases)]
    probe = TritonProbe(build_plan(shards, Reading(8), 0, CPU), shards)
    probe.compile(poisoned_rows(3))
    before = set(launched)
    launched.clear()
    for grad_dtype in (dtype, torch.float32):
        for case in cases:
            case.grad = torch.zeros_like(case.after, dtype=grad_dtype)
        probe.snapshot()
        probe.measure(poisoned_rows(3, bins), torch.ones(3, dtype=torch.float64))
        probe.count_nonfinite()
    return before, launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bins", [True, False])
def test_training_launches_what_was_compiled_at_attach(
    dtype: torch.dtype, bins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, launched = compiled_kinds(dtype, bins, monkeypatch)
    assert len({name for name, *_ in launched}) == len(KERNELS)
    assert launched <= compiled


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
        ({"bins": torch.zeros((1, BINS + 1), dtype=torch.float64)}, "bins must have shape"),
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
    for fill, made in ((fill_exact_columns, exact_tables()), (fill_run_columns, run_tables())):
        with pytest.raises((TypeError, ValueError), match=words):
            fill(made, addresses, one, replace(outputs(), **changed), 1, torch.float32)


def exact_tables() -> ExactTables:
    return ExactTables.build({0: 3}, {0: 3, 1: 4}, CPU, histogram=True)


def run_tables() -> RunTables:
    offsets, codes = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.uint8)
    return RunTables.build(np.array([0, 1, 3]), offsets, codes)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"rows": torch.zeros(3, dtype=torch.int64)}, TypeError, "rows must be torch.int32"),
        ({"numels": torch.zeros(2, dtype=torch.int64)}, ValueError, "numels must have shape"),
        ({"partials": torch.zeros((2, 8))}, TypeError, "partials must be torch.float64"),
        ({"counts": torch.zeros((1, BINS), dtype=torch.int64)}, ValueError, "counts must have"),
        ({"first_chunks": torch.zeros(3, dtype=torch.int64)}, ValueError, "first_chunks must have"),
    ],
)
def test_exact_tables_refuse(changed: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replace(exact_tables(), **changed)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"offsets": torch.zeros(3, dtype=torch.int16)}, TypeError, "int32 or int64, not"),
        ({"offsets": torch.zeros(2, dtype=torch.int32)}, ValueError, "offsets must have shape"),
        ({"codes": torch.zeros(3, dtype=torch.int8)}, TypeError, "codes must be torch.uint8"),
        ({"elements": torch.zeros(2)}, TypeError, "elements must be torch.int64"),
        ({"first_runs": torch.zeros(2, dtype=torch.int64)}, ValueError, "first_runs must have"),
        ({"codes": torch.zeros(3, device="meta", dtype=torch.uint8)}, ValueError, "on meta"),
    ],
)
def test_run_tables_refuse(changed: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replace(run_tables(), **changed)


def test_other_refusals() -> None:
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="applied must be"):
        fill_sampled_rows(tables(), one.float(), outputs(), 1)
    wide = replace(tables(), widest=MAX_SLOTS_PER_GROUP + 1)
    with pytest.raises(ValueError, match="the kernel supports at most"):
        fill_sampled_rows(wide, one, outputs(), 1)
    with pytest.raises(TypeError, match="not int8"):
        dtype_code(torch.int8)
    addresses = tables().addresses
    for fill, made in ((fill_exact_columns, exact_tables()), (fill_run_columns, run_tables())):
        with pytest.raises(TypeError, match="value_dtype"):
            fill(made, addresses, one, outputs(), 1, torch.bfloat16)
        with pytest.raises(TypeError, match="applied must be"):
            fill(made, addresses, one.float(), outputs(), 1, torch.float32)
        with pytest.raises(ValueError, match="addresses must have shape"):
            fill(made, addresses[:, :-1], one, outputs(), 1, torch.float32)


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
