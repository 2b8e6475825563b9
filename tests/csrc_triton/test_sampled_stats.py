"""The sampled and snapshot kernels, interpreted, against float64 references."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from row_reference import (
    Case,
    assert_rows,
    expected_checksum,
    flat,
    poisoned_rows,
    run,
)

from csrc_triton.row_layout import BIN_WORDS, GROUPS, MAX_COLUMNS, SUM
from distmon.probe import TorchProbe
from distmon.sampling.plan import SamplePlan

pytestmark = pytest.mark.usefixtures("launches")

SIZES = (0, 1, 7, 31, 1023, 1024, 1025, 4097)
NARROW = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
DTYPES = {"kept as fp32": NARROW, "kept as fp64": (torch.float64, torch.float32, torch.bfloat16)}


def numbers(kind: str, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary numbers mixed with a kind of trouble."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=make, dtype=torch.float64)
    pick = torch.randint(0, 6, (size,), generator=make)
    # Squares of anything larger overflow fp64 too.
    top = min(torch.finfo(dtype).max, 1e150)
    if kind == "nonfinite":
        for value, k in ((float("nan"), 0), (float("inf"), 1), (-float("inf"), 2), (0.0, 3)):
            x[pick == k] = value
    elif kind == "denormal":
        tiny = torch.finfo(dtype).smallest_normal
        for value, k in ((tiny / 2, 0), (-tiny / 4, 1), (tiny, 2), (-0.0, 3)):
            x[pick == k] = value
    elif kind == "extreme":
        for value, k in ((1e-38, 0), (1e38, 1), (top, 2), (-top, 3), (2.0**-44, 4)):
            x[pick == k] = max(-top, min(top, value))
    return x.to(dtype)


def make_cases(kind: str, dtypes: tuple[torch.dtype, ...]) -> list[Case]:
    cases = []
    for d, dtype in enumerate(dtypes):
        for s, size in enumerate(SIZES):
            seed = d * 100 + s
            before = numbers(kind, size, dtype, seed)
            step = flat(numbers("normal", size, dtype, seed + 1), torch.float64) * 1e-3
            after = (flat(before, torch.float64) + step).to(dtype)
            # fp8 parameters have gradients in bf16, as torch trains them.
            of = torch.bfloat16 if before.element_size() == 1 else dtype
            grad = None if (d + s) % 4 == 3 else numbers(kind, size, of, seed + 2)
            cases.append(Case(before, after, grad, taken=0.0 if (d + s) % 5 == 4 else 1.0))
    return cases


@pytest.mark.parametrize("kind", ["normal", "nonfinite", "denormal", "extreme"])
@pytest.mark.parametrize("kept", [*DTYPES])
def test_every_column_of_mixed_dtypes_in_one_launch_of_each_kernel(
    kind: str, kept: str, launches: Counter[str]
) -> None:
    cases = make_cases(kind, DTYPES[kept])
    launches.clear()
    rows, probe, plan = run(cases)
    # Gradients of more than 1024 elements are read whole; none is so long that it is sampled.
    kernels = ("snapshot", "sampled_stats", "exact_chunks", "exact_rows")
    assert launches == {f"{name}_kernel": 1 for name in kernels}
    assert_rows(rows, cases, plan)
    if kind != "nonfinite":  # NaN payloads may change when a number is widened
        sums = probe.row_checksums.tolist()
        small = [i for i, c in enumerate(cases) if c.after.numel() in (0, 7, 1023)]
        assert [sums[i] for i in small] == [expected_checksum(cases[i], plan, i) for i in small]


def test_snapshot_keeps_weights_and_clears_padding() -> None:
    cases = [Case(numbers("normal", n, torch.bfloat16, n), *[torch.ones(n)] * 2) for n in (9, 300)]
    _, _, plan = run(cases)
    for chunk in plan.chunks:
        for k, row in enumerate(chunk.rows):
            used = torch.arange(chunk.width) < chunk.group_counts[k][:, None]
            values = flat(cases[row].before, plan.dtype)[chunk.offsets[k].long()]
            wanted = torch.where(used.reshape(-1), values, 0)
            assert torch.equal(chunk.snapshot[k], wanted)


def test_weights_that_do_not_move_are_lost() -> None:
    weight = torch.tensor([1.0, -3.0, 0.0, 1e-40, 5.0, float("nan")])
    grad = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    rows, _, _ = run([Case(weight, weight.clone(), grad)])
    assert float(rows.sums[0, SUM["u_lost"]]) == 3
    half = torch.finfo(torch.float32).eps / 2
    assert float(rows.sums[0, SUM["u_lost_bound_sq"]]) == (1 + 4) * half**2


def test_long_offsets_and_any_sample_size() -> None:
    def longer(plan: SamplePlan) -> SamplePlan:
        offsets = plan.offsets.long()
        chunks, begin = [], 0
        for c in plan.chunks:
            view = offsets[begin : begin + c.offsets.numel()].view(c.offsets.shape)
            chunks.append(replace(c, offsets=view))
            begin += c.offsets.numel()
        return replace(plan, offsets=offsets, chunks=tuple(chunks))

    for sample in (8, 24, 600):
        cases = make_cases("normal", (torch.float32,))[3:]
        rows, _, plan = run(cases, sample=sample, change_plan=longer)
        assert_rows(rows, cases, plan)


@pytest.mark.parametrize("size", [1, 129])
def test_a_row_one_slot_longer_than_a_whole_number_of_blocks(size: int) -> None:
    # Alone in its chunk, so that no wider row stretches it: 129 elements are 17 slots per group.
    x = numbers("normal", size, torch.float32, size)
    case = Case(x, x + 1, x)
    rows, _, plan = run([case])
    assert plan.chunks[0].width % 16 == 1
    assert_rows(rows, [case], plan)


def test_a_parameter_of_more_than_2_31_elements() -> None:
    size = 2**31 + 2**29
    weight = torch.empty(size, dtype=torch.float8_e5m2)  # untouched pages take no memory
    rows, _, plan = run([Case(weight, weight, None)], sample=64)
    indices = torch.from_numpy(plan.samples[0].indices)
    assert plan.offsets.dtype == torch.int64
    assert int(indices.max()) >= 2**31
    bytes_ = weight.view(torch.uint8)
    bytes_[indices] = 0x3C  # 1.0
    bytes_[indices[-1]] = 0x40  # 2.0
    rows, _, plan = run([Case(weight, weight, None)], sample=64)
    assert float(rows.sums[0, SUM["w_sum"]]) == len(indices) + 1
    assert float(rows.maxima[0, 0]) == 2.0


class _Nowhere:
    def local(self, indices: np.ndarray) -> np.ndarray:
        return np.full_like(indices, -1)

    def bounds(self, _: int) -> tuple[int, int]:
        return 0, 0

    def key(self) -> str:
        return "nothing"


class _SecondHalf:
    def __init__(self, begin: int) -> None:
        self.begin = begin

    def local(self, indices: np.ndarray) -> np.ndarray:
        return np.where(indices >= self.begin, indices - self.begin, -1)

    def bounds(self, numel: int) -> tuple[int, int]:
        return self.begin, numel

    def key(self) -> str:
        return "half"


def test_a_parameter_that_is_elsewhere_leaves_a_row_that_adds_nothing() -> None:
    x = torch.randn(50)
    rows, probe, _ = run([Case(x[:0], x[:0], None, region=_Nowhere()), Case(x, x + 1, x)])
    assert not rows.sums[0].any()
    assert torch.equal(rows.maxima[0], torch.full((len(MAX_COLUMNS),), -torch.inf))
    assert not rows.bins[0].any()
    assert int(probe.row_checksums[0]) == 0


def test_strided_weights_and_gradients() -> None:
    w, g = torch.randn(60, 70), torch.randn(60, 70)
    flipped = torch.randn(70, 60).t()
    gaps = torch.randn(120, 140)[::2, ::2]
    cases = [
        Case(w, w + 1e-3, flipped),
        Case(flipped, flipped + 1e-3, g),
        Case(flipped, flipped + 1e-3, flipped),
        Case(gaps, (gaps + 1e-3), gaps),
        Case(torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last), w[:0], None),
    ]
    cases[4].after = cases[4].before + 1e-3
    rows, _, plan = run(cases)
    assert_rows(rows, cases, plan)


@pytest.mark.parametrize("words", BIN_WORDS)
@pytest.mark.parametrize("exact", [False, True])
def test_bins_are_packed_into_any_number_of_words(words: int, exact: bool) -> None:
    cases = make_cases("extreme", (torch.float32,))
    rows, _, plan = run(cases, words=words, exact=exact)
    if not exact:
        assert_rows(rows, cases, plan)
    torch_rows, _, _ = run(cases, TorchProbe, words=words, exact=exact)
    assert torch.equal(rows.bins, torch_rows.bins)


def test_no_bins_and_the_same_bits_twice() -> None:
    cases = make_cases("extreme", (torch.bfloat16,))
    first, _, plan = run(cases, bins=False)
    assert_rows(first, cases, plan)
    again, _, _ = run(cases, bins=False)
    assert torch.equal(first.sums, again.sums)
    assert torch.equal(first.maxima, again.maxima)


def test_gradients_that_move_come_and_go_are_followed() -> None:
    weight = torch.randn(100)
    case = Case(weight, weight, torch.randn(100))
    other = Case(weight, weight, None)
    _, probe, plan = run([case, other])
    case.grad, other.grad = None, torch.randn(100, dtype=torch.bfloat16)
    rows = poisoned_rows(2)
    probe.measure(rows, torch.ones(2, dtype=torch.float64))
    assert_rows(rows, [case, other], plan)
    assert GROUPS == 8
