"""The exact kernels, interpreted, against float64 references."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import fsum

import numpy as np
import pytest
import torch
from row_reference import (
    CPU,
    Case,
    assert_rows,
    bins_of,
    counts_in,
    flat,
    poisoned_rows,
    run,
    wide,
)
from test_sampled_stats import SIZES, numbers

from csrc_triton.address_layout import ADDRESS_COLUMNS
from csrc_triton.exact_stats import CHUNK, PARTIALS, ExactTables, fill_exact_columns
from csrc_triton.row_layout import MAX, SUM
from csrc_triton.tables import RowOutputs
from distmon.probe import Rows
from distmon.sampling.reading import Reading

pytestmark = pytest.mark.usefixtures("launches")


# Chains of at most CHUNK / BLOCK + 2 additions and a tree; the square is rounded too.
ROUNDINGS = 100


def assert_exact(
    rows: Rows, cases: list[Case], kept: torch.dtype, roundings: int = ROUNDINGS
) -> None:
    """Columns of weights and gradients of all cases are over every element."""
    for i, case in enumerate(cases):
        weight, grad = flat(case.after, kept), None if case.grad is None else flat(case.grad, kept)
        assert_side(rows, i, weight, "w", 1.0, False, roundings)
        assert_side(rows, i, grad, "g", case.taken, True, roundings)


def columns_of(what: str) -> list[str]:
    """SUM columns that are filled from a tensor."""
    return [name for name in SUM if name.startswith(f"{what}_") and name != "g_unreadable"]


def assert_side(
    rows: Rows,
    i: int,
    tensor: torch.Tensor | None,
    what: str,
    factor: float,
    bins: bool,
    roundings: int = ROUNDINGS,
) -> None:
    """Columns of one weight or gradient are over every element, and the bins where asked for."""
    about = f"row {i} {what}"
    got = {name: float(rows.sums[i, SUM[name]]) for name in columns_of(what)}
    if tensor is None or not factor:
        assert not any(got.values()), about
        return
    x = wide(tensor)
    good = x[np.isfinite(x)]
    assert got[f"{what}_count"] == x.size, about
    assert got[f"{what}_nan"] == np.isnan(x).sum(), about
    assert got[f"{what}_inf"] == np.isinf(x).sum(), about
    bound = roundings * 2.0**-53
    assert abs(got[f"{what}_sum"] - fsum(good)) <= bound * np.abs(good).sum(), about
    squares = good * good
    # In one group, or in those of its sample where that is whole.
    groups = fsum(got[f"{what}_sq{k}"] for k in range(8))
    assert abs(groups - fsum(squares)) <= bound * squares.sum(), about
    top, low = (good.max(), -good.min()) if good.size else (-np.inf, -np.inf)
    if what == "w":
        assert float(rows.maxima[i, MAX["w_absmax"]]) == np.float32(max(top, low)), about
    else:
        assert got["g_zero"] == (x == 0).sum(), about
        assert float(rows.maxima[i, MAX["g_max"]]) == np.float32(top), about
        assert float(rows.maxima[i, MAX["g_negmin"]]) == np.float32(low), about
    if bins:
        np.testing.assert_array_equal(counts_in(rows.bins[i]), bins_of(good), err_msg=about)


def off_boundary(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers at an address that is not a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    room[by:] = tensor
    return room[by:]


@pytest.mark.parametrize("kind", ["normal", "nonfinite", "denormal", "extreme"])
def test_every_dtype_and_size_at_any_alignment(kind: str, launches: Counter[str]) -> None:
    cases = []
    narrow = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    for d, dtype in enumerate(narrow):
        for s, size in enumerate(SIZES):
            weight = off_boundary(numbers(kind, size, dtype, 10 * d + s), (d + s) % 3)
            of = torch.bfloat16 if weight.element_size() == 1 else dtype
            grad = numbers(kind, size, of, 10 * d + s + 1)
            given = None if (d + s) % 4 == 3 else off_boundary(grad, 2 * (s % 4))
            cases.append(Case(weight, weight, given, taken=float((d + s) % 5 != 4)))
    launches.clear()
    rows, _, plan = run(cases, sample=8, exact=True)
    assert launches["exact_chunks_kernel"] == launches["exact_rows_kernel"] == 1
    assert_exact(rows, cases, plan.dtype)


def test_fp64_among_others() -> None:
    cases = [
        Case(x, x, x.clone())
        for x in (numbers("extreme", 1500, t, 3) for t in (torch.float64, torch.bfloat16))
    ]
    rows, _, plan = run(cases, sample=8, exact=True)
    assert_exact(rows, cases, plan.dtype)


def test_several_chunks_and_strides() -> None:
    big = off_boundary(numbers("nonfinite", CHUNK + 1100, torch.bfloat16, 1), 3)
    gaps, flipped = torch.randn(60, 80)[:, ::2], torch.randn(30, 50).t()
    cases = [
        Case(big, big, None),
        Case(gaps, gaps, gaps),
        Case(flipped, flipped, torch.randn(50, 30)),
    ]
    first, probe, plan = run(cases, sample=8, exact=True)
    assert_exact(first, cases, plan.dtype)
    again = poisoned_rows(len(cases))
    probe.measure(again, torch.ones(3, dtype=torch.float64))
    assert torch.equal(first.sums, again.sums)
    assert torch.equal(first.bins, again.bins)


def test_partials_of_a_billion_elements_add_up_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = 16_000  # of 65536 elements: 1.05e9
    numels = {0: chunks * CHUNK}
    tables = ExactTables.build(numels, numels, torch.device("cpu"), histogram=True)
    make = torch.Generator().manual_seed(0)
    partials = torch.randn((2 * chunks, PARTIALS), generator=make, dtype=torch.float64).exp()
    partials[:, PARTIALS - 1] = float("nan")
    tables = replace(tables, partials=partials)
    rows = poisoned_rows(1)
    outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, torch.zeros(1, dtype=torch.int64))
    addresses = torch.ones((1, len(ADDRESS_COLUMNS)), dtype=torch.int64)
    one = torch.ones(1, dtype=torch.float64)

    class Skipped:
        def __getitem__(self, grid: object) -> object:
            return lambda *_, **__: None

    monkeypatch.setattr("csrc_triton.exact_stats.exact_chunks_kernel", Skipped())
    fill_exact_columns(tables, addresses, one, outputs, 1, torch.float32)
    for side, what in enumerate("gw"):
        for column, name in ((0, f"{what}_sum"), (6, f"{what}_sq0"), (1, f"{what}_nan")):
            wanted = fsum(partials[side * chunks : (side + 1) * chunks, column].tolist())
            got = float(rows.sums[0, SUM[name]])
            assert abs(got - wanted) <= (chunks / 64 + 8) * 2.0**-53 * wanted, name


@pytest.mark.parametrize(
    ("weights", "gradients", "histogram"),
    [([1], [0, 2], True), ([], [0, 1, 2], False), ([2, 0], [], True), ([], [], True)],
)
def test_only_the_tensors_in_the_table_are_read_and_written(
    weights: list[int], gradients: list[int], histogram: bool, launches: Counter[str]
) -> None:
    cases = [Case(*[numbers("nonfinite", n, torch.float32, n)] * 2, None) for n in (5, 2000, 3000)]
    for case in cases:
        case.grad = numbers("nonfinite", case.after.numel(), torch.bfloat16, 1)
    addresses = torch.zeros((3, len(ADDRESS_COLUMNS)), dtype=torch.int64)
    for row, case in enumerate(cases):
        if row in weights:
            addresses[row, :2] = torch.tensor([case.after.data_ptr(), 0])
        if row in gradients:
            addresses[row, 3:5] = torch.tensor([case.grad.data_ptr(), 1])
    numels = [case.after.numel() for case in cases]
    tables = ExactTables.build(
        {i: numels[i] for i in weights}, {i: numels[i] for i in gradients}, CPU, histogram
    )
    tables.partials.fill_(float("nan"))
    rows = poisoned_rows(3)
    outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, torch.zeros(3, dtype=torch.int64))
    launches.clear()
    one = torch.ones(3, dtype=torch.float64)
    fill_exact_columns(tables, addresses, one, outputs, 0b11, torch.float32)
    assert sum(launches.values()) == (2 if weights or gradients else 0)
    for row, case in enumerate(cases):
        for what, read in (("w", row in weights), ("g", row in gradients)):
            columns = [SUM[name] for name in columns_of(what)]
            assert rows.sums[row, columns].isnan().all() == (not read)
            assert not read or not rows.sums[row, columns].isnan().any()
        assert rows.maxima[row].isnan().tolist() == [
            row not in weights,
            row not in gradients,
            row not in gradients,
            True,
        ]
        assert rows.bins[row].isnan().all() == (row not in gradients or not histogram)
        if row in gradients:
            assert_side(rows, row, case.grad, "g", 1.0, histogram)
        if row in weights:
            assert_side(rows, row, case.after, "w", 1.0, False)


@pytest.mark.parametrize("whole_weights", [False, True])
def test_gradients_in_full_without_weights(whole_weights: bool) -> None:
    cases = [Case(x, x * 1.5, x * 2) for x in (torch.randn(n) for n in (3, 1000, 70_000))]
    cases[1].taken = 0.0
    reading = Reading(64, whole_gradients=True, whole_weights=whole_weights)
    rows, _, plan = run(cases, reading=reading)
    if whole_weights:
        for row, case in enumerate(cases):
            if case.after.numel() > 64:
                assert_side(rows, row, case.after, "w", 1.0, False)
                assert_side(rows, row, case.grad, "g", case.taken, True)
    else:
        assert_rows(rows, cases, plan)
