"""The exact kernels, interpreted, against float64 references."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import fsum

import numpy as np
import pytest
import torch
from row_reference import Case, bins_of, flat, poisoned_rows, run, wide
from test_sampled_stats import SIZES, numbers

from csrc_triton.address_layout import ADDRESS_COLUMNS
from csrc_triton.exact_stats import CHUNK, PARTIALS, ExactTables, fill_exact_columns
from csrc_triton.row_layout import MAX, SUM
from csrc_triton.tables import RowOutputs
from distmon.probe import Rows

pytestmark = pytest.mark.usefixtures("launches")


# Chains of at most CHUNK / BLOCK + 2 additions and a tree; the square is rounded too.
ROUNDINGS = 100


def assert_exact(
    rows: Rows, cases: list[Case], kept: torch.dtype, roundings: int = ROUNDINGS
) -> None:
    for i, case in enumerate(cases):
        for what, tensor, factor in (("w", case.after, 1.0), ("g", case.grad, case.taken)):
            about = f"row {i} {what}: {case.after.dtype} {tuple(case.after.shape)}"
            got = {k: float(rows.sums[i, c]) for k, c in SUM.items() if k.startswith(what)}
            if tensor is None or not factor:
                assert not any(got.values()), about
                continue
            x = wide(flat(tensor, kept))
            good = x[np.isfinite(x)]
            assert got[f"{what}_count"] == x.size, about
            assert got[f"{what}_nan"] == np.isnan(x).sum(), about
            assert got[f"{what}_inf"] == np.isinf(x).sum(), about
            bound = roundings * 2.0**-53
            assert abs(got[f"{what}_sum"] - fsum(good)) <= bound * np.abs(good).sum(), about
            squares = good * good
            assert abs(got[f"{what}_sq0"] - fsum(squares)) <= bound * squares.sum(), about
            assert not any(got[f"{what}_sq{k}"] for k in range(1, 8)), about
            top, low = (good.max(), -good.min()) if good.size else (-np.inf, -np.inf)
            if what == "w":
                assert float(rows.maxima[i, MAX["w_absmax"]]) == np.float32(max(top, low)), about
            else:
                assert got["g_zero"] == (x == 0).sum(), about
                assert float(rows.maxima[i, MAX["g_max"]]) == np.float32(top), about
                assert float(rows.maxima[i, MAX["g_negmin"]]) == np.float32(low), about
                np.testing.assert_array_equal(rows.bins[i].numpy(), bins_of(good), err_msg=about)


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
    tables = ExactTables.build([chunks * CHUNK], torch.device("cpu"))
    make = torch.Generator().manual_seed(0)
    partials = torch.randn((2, chunks, PARTIALS), generator=make, dtype=torch.float64).exp()
    partials[..., PARTIALS - 1] = float("nan")
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
    for side, what in enumerate("wg"):
        for column, name in enumerate((f"{what}_sum", f"{what}_sq0", f"{what}_nan")):
            wanted = fsum(partials[side, :, column].tolist())
            got = float(rows.sums[0, SUM[name]])
            assert abs(got - wanted) <= (chunks / 64 + 8) * 2.0**-53 * wanted, name
