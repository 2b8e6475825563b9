"""The kernels over gradient runs, interpreted, against float64 references."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import fsum

import numpy as np
import pytest
import torch
from row_reference import Case, assert_rows, flat, poisoned_rows, run, wide
from test_sampled_stats import numbers

from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS, dtype_code, dtype_set
from csrc_triton.gradient_runs import (
    BLOCK_RUNS,
    CHUNK_RUNS,
    LINES,
    PARTIALS,
    RunTables,
    fill_run_columns,
)
from csrc_triton.row_layout import BY_LANE, GROUPS, MAX, RUN, SUM
from csrc_triton.tables import RowOutputs
from distmon.probe import Rows
from distmon.sampling.plan import SamplePlan

pytestmark = pytest.mark.usefixtures("launches")

KINDS = ("normal", "nonfinite", "denormal", "extreme")
NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
COLUMNS = [name for name in SUM if name.startswith("g_") and name != "g_unreadable"]
# The sum of a run, a chain over the tiles of a chunk, a tree over a tile, and the square itself.
ROUNDINGS = 3 + CHUNK_RUNS // BLOCK_RUNS + 6 + 1


@dataclass
class Runs:
    """A gradient and the runs that are read of it: offset, length, group code."""

    grad: torch.Tensor | None
    offsets: np.ndarray
    lengths: np.ndarray
    codes: np.ndarray
    taken: float = 1.0

    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        """Offset and group of each element, one run after another."""
        offsets, groups = [], []
        for first, length, code in zip(self.offsets, self.lengths, self.codes, strict=True):
            lanes = np.arange(length)
            offsets.append(first + lanes)
            groups.append(code - BY_LANE + lanes if code >= BY_LANE else np.full(length, code))
        return np.concatenate(offsets or [np.empty(0, int)]), np.concatenate(groups or [[]])


def make_runs(
    kind: str, dtype: torch.dtype, count: int, seed: int, absent: bool = False, taken: float = 1.0
) -> Runs:
    """Runs of all lengths and groups of both kinds, anywhere in a gradient."""
    make = np.random.default_rng(seed)
    lengths = make.integers(1, RUN + 1, count)
    codes = make.integers(0, GROUPS, count)
    # An element by lane belongs to one of the groups: a run that starts late is short.
    by_lane = make.random(count) < 0.5
    codes = np.where(by_lane, BY_LANE + make.integers(0, RUN - lengths + 1), codes)
    if count > 8:
        lengths[:8], codes[:8] = np.arange(1, 9), np.arange(8)
    gaps = make.integers(0, 3, count)
    offsets = np.cumsum(lengths + gaps) - lengths
    grad = numbers(kind, int(offsets[-1] + lengths[-1]) if count else 0, dtype, seed)
    return Runs(None if absent else grad, offsets, lengths, codes, taken)


def fill(
    gradients: list[Runs], kept: torch.dtype, offset_dtype: torch.dtype = torch.int32
) -> tuple[Rows, RunTables]:
    """Launch over these gradients with everything poisoned before."""
    first = np.cumsum([0, *(len(runs.offsets) for runs in gradients)])
    offsets = np.concatenate([runs.offsets for runs in gradients])
    codes = np.concatenate([(runs.codes << 3) + runs.lengths - 1 for runs in gradients])
    tables = RunTables.build(
        first,
        torch.from_numpy(offsets).to(offset_dtype),
        torch.from_numpy(codes.astype(np.uint8)),
    )
    tables.partials.fill_(float("nan"))
    addresses = torch.zeros((len(gradients), len(ADDRESS_COLUMNS)), dtype=torch.int64)
    dtypes = set()
    for row, runs in enumerate(gradients):
        if runs.grad is not None and runs.grad.numel():
            addresses[row, ADDRESS["grad"]] = runs.grad.data_ptr()
            addresses[row, ADDRESS["grad_code"]] = dtype_code(runs.grad.dtype)
            dtypes.add(runs.grad.dtype)
    rows = poisoned_rows(len(gradients))
    checksums = torch.zeros(len(gradients), dtype=torch.int64)
    outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, checksums)
    applied = torch.tensor([runs.taken for runs in gradients], dtype=torch.float64)
    fill_run_columns(tables, addresses, applied, outputs, dtype_set(dtypes), kept)
    return rows, tables


def assert_columns(rows: Rows, gradients: list[Runs], kept: torch.dtype) -> None:
    """Gradient columns against sums in Python; all other columns are as they were."""
    for i, runs in enumerate(gradients):
        got = {name: float(rows.sums[i, SUM[name]]) for name in COLUMNS}
        top, low = (float(rows.maxima[i, MAX[name]]) for name in ("g_max", "g_negmin"))
        others = [c for name, c in SUM.items() if name not in COLUMNS]
        assert rows.sums[i, others].isnan().all()
        assert rows.maxima[i, [MAX["w_absmax"], MAX["u_absmax"]]].isnan().all()
        assert rows.bins is not None
        assert rows.bins[i].isnan().all()
        if not len(runs.offsets):
            assert rows.sums[i].isnan().all()
            continue
        if runs.grad is None or not runs.taken:
            assert not any(got.values())
            assert (top, low) == (-np.inf, -np.inf)
            continue
        offsets, groups = runs.elements()
        x = wide(flat(runs.grad, kept))[offsets]
        finite = np.isfinite(x)
        good = x[finite]
        assert got["g_count"] == len(x)
        assert got["g_nan"] == np.isnan(x).sum()
        assert got["g_inf"] == np.isinf(x).sum()
        assert got["g_zero"] == (x == 0).sum()
        bound = (ROUNDINGS + len(runs.offsets) / CHUNK_RUNS) * 2.0**-53
        assert abs(got["g_sum"] - fsum(good)) <= bound * np.abs(good).sum()
        for g in range(GROUPS):
            squares = x[finite & (groups == g)] ** 2
            assert abs(got[f"g_sq{g}"] - fsum(squares)) <= bound * squares.sum(), (i, g)
        assert top == (np.float32(good.max()) if good.size else -np.inf)
        assert low == (np.float32(-good.min()) if good.size else -np.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
def test_every_dtype_length_and_group(
    kind: str, offset_dtype: torch.dtype, launches: Counter[str]
) -> None:
    gradients = []
    for d, dtype in enumerate(NARROW):
        for c, count in enumerate((0, 1, BLOCK_RUNS - 1, BLOCK_RUNS + 1)):
            absent, taken = (d + c) % 5 == 4, float((d + c) % 4 != 3)
            gradients.append(make_runs(kind, dtype, count, 10 * d + c, absent, taken))
    launches.clear()
    rows, _ = fill(gradients, torch.float32, offset_dtype)
    assert launches["run_chunks_kernel"] == launches["run_rows_kernel"] == 1
    assert_columns(rows, gradients, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_widened_to_fp64(kind: str) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    gradients = [make_runs(kind, dtype, 50, d) for d, dtype in enumerate(dtypes)]
    rows, _ = fill(gradients, torch.float64)
    with np.errstate(over="ignore"):  # extremes are kept in fp32
        assert_columns(rows, gradients, torch.float64)


def test_several_chunks_and_the_same_bits_twice() -> None:
    counts = (CHUNK_RUNS, CHUNK_RUNS + 1, 2 * CHUNK_RUNS + 77, 3)
    gradients = [make_runs("nonfinite", torch.float32, n, n) for n in counts]
    rows, tables = fill(gradients, torch.float32)
    assert len(tables.chunk_tensors) == 1 + 2 + 3 + 1
    assert_columns(rows, gradients, torch.float32)
    again, _ = fill(gradients, torch.float32)
    gradient = [SUM[name] for name in COLUMNS]
    assert torch.equal(rows.sums[:, gradient], again.sums[:, gradient])


def test_offsets_beyond_2_31() -> None:
    size = 2**31 + 2**29
    grad = torch.empty(size, dtype=torch.float8_e5m2)  # untouched pages take no memory
    offsets = np.array([2**31 - 4, size - 3])
    grad.view(torch.uint8)[offsets[0] : offsets[0] + 8] = 0x3C  # 1.0
    grad.view(torch.uint8)[-3:] = 0xC0  # -2.0
    runs = Runs(grad, offsets, np.array([8, 3]), np.array([5, BY_LANE + 2]))
    rows, _ = fill([runs], torch.float32, torch.int64)
    assert rows.sums[0, SUM["g_count"]] == 11
    assert rows.sums[0, SUM["g_sum"]] == 2
    squares = rows.sums[0, SUM["g_sq0"] : SUM["g_sq0"] + GROUPS]
    assert squares.tolist() == [0, 0, 4, 4, 4, 8, 0, 0]
    assert rows.maxima[0, MAX["g_max"] : MAX["g_negmin"] + 1].tolist() == [1, 2]


def test_partials_of_many_chunks_add_up_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 8192  # of 512 runs: all that may be sampled of one model
    codes = torch.zeros(chunks * CHUNK_RUNS, dtype=torch.uint8)
    tables = RunTables.build(np.array([0, len(codes)]), codes.int(), codes)
    make = torch.Generator().manual_seed(0)
    partials = torch.randn((chunks, PARTIALS), generator=make, dtype=torch.float64).exp()
    partials[:, -2:] = float("nan")
    tables = replace(tables, partials=partials)

    class Skipped:
        def __getitem__(self, grid: object) -> object:
            return lambda *_, **__: None

    monkeypatch.setattr("csrc_triton.gradient_runs.run_chunks_kernel", Skipped())
    rows = poisoned_rows(1)
    outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, torch.zeros(1, dtype=torch.int64))
    addresses = torch.ones((1, len(ADDRESS_COLUMNS)), dtype=torch.int64)
    one = torch.ones(1, dtype=torch.float64)
    fill_run_columns(tables, addresses, one, outputs, 1, torch.float32)
    assert rows.sums[0, SUM["g_count"]] == len(codes)
    named = [(0, "g_sum"), (1, "g_nan"), (2, "g_inf"), (3, "g_zero")]
    named += [(6 + g, f"g_sq{g}") for g in range(GROUPS)]
    for column, name in named:
        wanted = fsum(partials[:, column].tolist())
        got = float(rows.sums[0, SUM[name]])
        assert abs(got - wanted) <= (chunks / LINES + 8) * 2.0**-53 * wanted, name
    assert rows.maxima[0, MAX["g_max"]] == partials[:, 4].max().float()
    assert rows.maxima[0, MAX["g_negmin"]] == partials[:, 5].max().float()


def longer(plan: SamplePlan) -> SamplePlan:
    runs = plan.gradient_runs
    return replace(plan, gradient_runs=replace(runs, offsets=runs.offsets.long()))


@pytest.mark.parametrize("change", [lambda plan: plan, longer])
def test_the_runs_of_a_plan(change: object, launches: Counter[str]) -> None:
    tall, wide_matrix = torch.randn(4100, 1101), torch.randn(20, 4500)
    cases = [
        Case(tall, tall * 1.001, tall.flip(0)),  # every row, by lane, short at the end of a row
        Case(torch.zeros(100, 100), torch.ones(100, 100), torch.randn(100, 100)),
        Case(wide_matrix, wide_matrix + 1, wide_matrix.clone()),  # every column
        Case(torch.zeros(90, 100), torch.ones(90, 100), None),
        Case(torch.zeros(90, 100), torch.ones(90, 100), torch.randn(90, 100).bfloat16()),
        Case(torch.zeros(500), torch.ones(500), torch.randn(500)),
    ]
    cases[4].taken = 0.0
    launches.clear()
    rows, _, plan = run(cases, change_plan=change)
    assert launches["run_chunks_kernel"] == launches["run_rows_kernel"] == 1
    assert launches["exact_chunks_kernel"] == 0  # the sample has all of the last one
    assert plan.gradient_samples[0].by_lane
    assert not plan.gradient_samples[2].by_lane
    assert_rows(rows, cases, plan)


def test_gradients_with_other_strides() -> None:
    base = torch.randn(100, 220)
    conv = torch.randn(40, 30, 3, 3)
    cases = [
        Case(torch.zeros(220, 100), torch.ones(220, 100), base.t()),
        Case(torch.zeros(100, 110), torch.ones(100, 110), base[:, ::2]),
        Case(torch.zeros(100, 203), torch.ones(100, 203), base[:, 3:206]),
        Case(conv, conv, conv.to(memory_format=torch.channels_last)),
        Case(torch.zeros(100, 110), torch.ones(100, 110), torch.randn(110).expand(100, 110)),
        Case(torch.zeros(90, 100), torch.ones(90, 100), torch.randn(90, 100)),
    ]
    rows, probe, plan = run(cases)
    assert not plan.whole_gradients
    assert_rows(rows, cases, plan)
    # Strides change from one observation to the next, and back.
    for grad in (torch.randn(220, 100), cases[0].grad, None):
        cases[0].grad = grad
        again = poisoned_rows(len(cases))
        probe.measure(again, torch.ones(len(cases), dtype=torch.float64))
        assert_rows(again, cases, plan)
