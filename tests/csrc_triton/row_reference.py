"""Rows computed the slow and obvious way, and probes to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
import torch
from given_shard import given_shard

from csrc_triton.row_layout import (
    BIN_WORDS,
    BINS,
    GROUPS,
    HALF_BINS,
    MAX,
    MAX_COLUMNS,
    SUM,
    SUM_COLUMNS,
)
from distmon.layout.shard import Everything, Region, Shard
from distmon.probe import Rows
from distmon.probe.backend import Probe
from distmon.probe.percentiles import magnitude_edges
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling.plan import SamplePlan, build_plan
from distmon.sampling.reading import Reading

CPU = torch.device("cpu")


@dataclass
class Case:
    """One parameter before and after a step."""

    before: torch.Tensor
    after: torch.Tensor
    grad: torch.Tensor | None
    taken: float = 1.0
    region: Region | None = None
    global_shape: tuple[int, ...] | None = None
    """Of the unsharded parameter, where it is not all here."""

    def shard(self, name: str) -> tuple[Shard, Callable[[], None]]:
        """A shard whose weight is `before` until the returned function makes the step."""
        current = [self.before]

        def step() -> None:
            current[0] = self.after

        shard = given_shard(
            name,
            self.global_shape or tuple(self.after.shape),
            self.region or Everything(),
            weight=lambda: current[0],
            grad=lambda: self.grad,
            dtype=self.after.dtype,
        )
        return shard, step


def poisoned_rows(count: int, bins: bool = True, words: int = BIN_WORDS[0]) -> Rows:
    """Rows full of NaN: what a probe does not write shows."""
    nan = float("nan")
    return Rows(
        sums=torch.full((count, len(SUM_COLUMNS)), nan, dtype=torch.float64),
        maxima=torch.full((count, len(MAX_COLUMNS)), nan),
        bins=torch.full((count, words), nan, dtype=torch.float64) if bins else None,
    )


def run(
    cases: Sequence[Case],
    probe_type: Callable[..., Probe] = TritonProbe,
    sample: int = 1024,
    exact: bool = False,
    change_plan: Callable[[SamplePlan], SamplePlan] = lambda plan: plan,
    bins: bool = True,
    reading: Reading | None = None,
    words: int = BIN_WORDS[0],
) -> tuple[Rows, Probe, SamplePlan]:
    """Snapshot, step and measure through a probe, with everything poisoned before.

    `reading` is what is read, unless `sample` and `exact` say it all.
    """
    pairs = [case.shard(f"p{i}") for i, case in enumerate(cases)]
    shards = [shard for shard, _ in pairs]
    if reading is None:
        reading = Reading(sample, whole_gradients=exact, whole_weights=exact)
    plan = change_plan(build_plan(shards, reading, 0, CPU))
    plan.snapshot.fill_(float("nan"))
    probe = probe_type(plan, shards)
    probe.row_checksums.fill_(-1 if probe_type is TritonProbe else 0)
    probe.snapshot()
    for _, step in pairs:
        step()
    rows = poisoned_rows(len(cases), bins, words)
    probe.measure(rows, torch.tensor([c.taken for c in cases], dtype=torch.float64))
    return rows, probe, plan


def counts_in(words: torch.Tensor) -> list[int]:
    """The counts of BINS bins that a row of words holds, taken out by division."""
    size = {80: 1 << 17, 120: 1 << 26, 240: 1 << 52}[len(words)]
    counts, rest = [], [int(word) for word in words.tolist()]
    for _ in range(BINS // len(words)):
        counts += [number % size for number in rest]
        rest = [number // size for number in rest]
    assert not any(rest)
    return counts


def flat(tensor: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    return tensor.float().reshape(-1) if tensor.element_size() == 1 else tensor.reshape(-1).to(kept)


def wide(values: torch.Tensor) -> np.ndarray:
    return values.double().numpy()


def bins_of(values: np.ndarray) -> np.ndarray:
    """Histogram by looking up each magnitude among the bin edges."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    key = np.searchsorted(magnitude_edges(), np.abs(narrow).astype(np.float64), side="right") - 1
    where = np.where(np.signbit(narrow), HALF_BINS - 1 - key, HALF_BINS + key)
    return np.bincount(where, minlength=BINS).astype(np.float64)


def gradient_elements(plan: SamplePlan, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Index and group of the elements that the gradient columns are over."""
    if row in plan.whole_gradients:
        everything = np.arange(plan.samples[row].numel)
        return everything, np.zeros_like(everything)
    sampled = np.diff(plan.gradient_runs.first)[row] > 0
    sample = plan.gradient_samples[row] if sampled else plan.samples[row]
    return sample.indices, sample.element_groups


def expected_row(
    case: Case, plan: SamplePlan, row: int
) -> tuple[dict[str, tuple[float, float]], dict[str, float], np.ndarray]:
    """SUM columns as (value, allowed error), MAX columns and bins of a whole parameter.

    Sums may differ by the rounding of n additions in fp64: n * 2**-53 times the sum of magnitudes,
    doubled because a square is rounded too. Everything else must be equal.
    """
    kept, sample = plan.dtype, plan.samples[row]
    local = torch.from_numpy(sample.indices)
    w, old = flat(case.after, kept)[local], flat(case.before, kept)[local]
    graded = 0.0 if case.grad is None else case.taken
    sums = dict.fromkeys(SUM_COLUMNS, (0.0, 0.0))
    maxima = dict.fromkeys(MAX_COLUMNS, -np.inf)

    def add(what: str, x: np.ndarray, factor: float, group: np.ndarray) -> None:
        def bounded(y: np.ndarray) -> tuple[float, float]:
            with np.errstate(over="ignore"):
                return fsum(y) * factor, len(y) * 2.0**-52 * float(np.abs(y).sum())

        sums[f"{what}_count"] = (len(x) * factor, 0.0)
        sums[f"{what}_sum"] = bounded(x)
        for k in range(GROUPS):
            sums[f"{what}_sq{k}"] = bounded(x[group == k] ** 2)

    clean = torch.where(torch.isfinite(w), w, 0)
    add("w", wide(clean), 1.0, sample.element_groups)
    sums["w_nan"] = (float(torch.isnan(w).sum()), 0.0)
    sums["w_inf"] = (float(torch.isinf(w).sum()), 0.0)
    if torch.isfinite(w).any():
        maxima["w_absmax"] = float(np.float32(wide(clean.abs()).max()))
    moved = clean - old
    moved = torch.where(torch.isfinite(moved) & torch.isfinite(w), moved, 0)
    add("u", wide(moved), case.taken, sample.element_groups)
    if len(w) and case.taken:
        maxima["u_absmax"] = float(np.float32(wide(moved.abs()).max()))
    bins = np.zeros(BINS)
    if case.grad is not None:
        g = flat(case.grad, kept)[local]
        good = torch.isfinite(g)
        bins = bins_of(wide(g[good])) * graded
        lost = good & (g != 0) & (clean != 0) & (moved == 0)
        half_ulp = torch.finfo(case.after.dtype).eps / 2
        exponent = np.frexp(wide(clean[lost]))[1] - 1
        smallest = -126 if kept == torch.float32 else -1022
        binade = np.where(exponent < smallest, 0.0, np.ldexp(1.0, exponent))
        bound = (binade * half_ulp) ** 2
        sums["u_graded"] = (float((good & (g != 0)).sum()) * graded, 0.0)
        sums["u_lost"] = (float(lost.sum()) * graded, 0.0)
        sums["u_lost_bound_sq"] = (fsum(bound) * graded, len(bound) * 2.0**-51 * float(bound.sum()))

        indices, groups = gradient_elements(plan, row)
        g = flat(case.grad, kept)[torch.from_numpy(indices)]
        good = torch.isfinite(g)
        add("g", wide(torch.where(good, g, 0)), graded, groups)
        sums["g_nan"] = (float(torch.isnan(g).sum()) * graded, 0.0)
        sums["g_inf"] = (float(torch.isinf(g).sum()) * graded, 0.0)
        sums["g_zero"] = (float((g == 0).sum()) * graded, 0.0)
        if good.any() and graded:
            maxima["g_max"] = float(np.float32(wide(g[good]).max()))
            maxima["g_negmin"] = float(np.float32(-wide(g[good]).min()))
    return sums, maxima, bins


def expected_checksum(case: Case, plan: SamplePlan, row: int) -> int:
    """In Python integers: bits times the multiplier of the slot, modulo 2**64."""
    values = flat(case.after, plan.dtype)
    kind = (torch.int32, 32) if plan.dtype == torch.float32 else (torch.int64, 64)
    total = 0
    for chunk in plan.chunks:
        for k in np.flatnonzero(chunk.rows == row):
            for slot, offset in enumerate(chunk.offsets[k].tolist()):
                if slot % chunk.width >= int(chunk.group_counts[k, slot // chunk.width]):
                    continue
                bits = int(values[offset].view(kind[0]))
                number = slot % chunk.width * GROUPS + slot // chunk.width
                z = 0x9E3779B97F4A7C15 * (number + 1) % 2**64
                z = (z ^ (z >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 | 1
                total += bits * z
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def assert_rows(rows: Rows, cases: Sequence[Case], plan: SamplePlan) -> None:
    """Every column of every row against the reference."""
    for i, case in enumerate(cases):
        about = f"row {i}: {case.after.dtype} {tuple(case.after.shape)}"
        sums, maxima, bins = expected_row(case, plan, i)
        for name, (value, error) in sums.items():
            got = float(rows.sums[i, SUM[name]])
            near = abs(got - value) <= error if np.isfinite(value) else got == value
            assert near, f"{about} {name}: {got}, expected {value} within {error}"
        for name, value in maxima.items():
            assert float(rows.maxima[i, MAX[name]]) == value, f"{about} {name}"
        if rows.bins is not None:
            np.testing.assert_array_equal(counts_in(rows.bins[i]), bins, err_msg=about)


# Counts, which have to be equal; what is left are sums, that depend on the order of additions.
COUNTS = [i for i, n in enumerate(SUM_COLUMNS) if not n.endswith("_sum") and "_sq" not in n]


def assert_probes_agree(
    cases: Sequence[Case],
    mine_type: Callable[..., Probe],
    theirs_type: Callable[..., Probe],
    sample: int,
    exact: bool,
) -> None:
    """The same cases through two probes give the same rows."""
    mine, my_probe, plan = run(cases, mine_type, sample, exact)
    theirs, their_probe, _ = run(cases, theirs_type, sample, exact)
    assert torch.equal(mine.sums[:, COUNTS], theirs.sums[:, COUNTS])
    assert torch.equal(mine.maxima, theirs.maxima)
    assert torch.equal(mine.bins, theirs.bins)
    nan = [c.after.isnan().any() for c in cases]
    kept = torch.tensor([not n for n in nan])
    assert torch.equal(my_probe.row_checksums[kept], their_probe.row_checksums[kept])
    if not any(nan):
        assert torch.equal(my_probe.row_checksums, their_probe.row_checksums)
    # Both add n numbers in fp64 in some order; a sum's error is relative to the magnitudes.
    for column, name in enumerate(SUM_COLUMNS):
        if column in COUNTS:
            continue
        for i, case in enumerate(cases):
            values = [case.after, case.before, *([] if case.grad is None else [case.grad])]
            top = max(
                float(np.nan_to_num(v.double().numpy(), posinf=0, neginf=0).__abs__().max())
                for v in values
            )
            size = 2 * top if name.endswith("_sum") else (2 * top) ** 2
            error = case.after.numel() ** 2 * 2.0**-52 * size
            gap = abs(float(mine.sums[i, column] - theirs.sums[i, column]))
            assert gap <= error, f"row {i} {name}: {gap} > {error}"
    assert len(plan.names) == len(cases)
