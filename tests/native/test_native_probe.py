"""The native probe against float64 references and against the torch probe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import (
    CPU,
    Case,
    assert_probes_agree,
    assert_rows,
    expected_checksum,
    poisoned_rows,
    run,
)
from test_backends_agree import parameters
from test_exact_stats import assert_exact, off_boundary
from test_sampled_stats import DTYPES, SIZES, _Nowhere, _SecondHalf, make_cases, numbers

import distmon
from csrc_triton.address_layout import DTYPE_CODES
from csrc_triton.row_layout import BIN_WORDS, MAX_COLUMNS, SUM
from distmon.errors import ConfigError
from distmon.layout import capture
from distmon.layout.plain import plain_shard
from distmon.native import NativeModule
from distmon.probe import TorchProbe
from distmon.probe.backend import Probe, choose_probe
from distmon.probe.native_probe import NativeProbe
from distmon.sampling.plan import SamplePlan, build_plan
from distmon.sampling.reading import Reading

KINDS = ("normal", "nonfinite", "denormal", "extreme")


@pytest.fixture(scope="session")
def probe_type(native: NativeModule) -> Callable[..., Probe]:
    """Makes a native probe as other probes are made."""
    return partial(NativeProbe, native=native)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [*DTYPES])
def test_every_column_of_mixed_dtypes(
    kind: str, kept: str, probe_type: Callable[..., Probe]
) -> None:
    cases = make_cases(kind, DTYPES[kept])
    rows, probe, plan = run(cases, probe_type)
    assert_rows(rows, cases, plan)
    if kind != "nonfinite":  # NaN payloads may change when a number is widened
        sums = probe.row_checksums.tolist()
        small = [i for i, c in enumerate(cases) if c.after.numel() in (0, 7, 1023)]
        assert [sums[i] for i in small] == [expected_checksum(cases[i], plan, i) for i in small]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(cases=st.lists(parameters(), min_size=1, max_size=4), sample=st.sampled_from([8, 40, 256]))
def test_any_parameters_as_the_torch_probe(
    cases: list[Case], sample: int, probe_type: Callable[..., Probe]
) -> None:
    for exact in (False, True):
        assert_probes_agree(cases, probe_type, TorchProbe, sample, exact)


def test_long_offsets_short_groups_and_wide_ones(probe_type: Callable[..., Probe]) -> None:
    def longer(plan: SamplePlan) -> SamplePlan:
        offsets = plan.offsets.long()
        chunks, begin = [], 0
        for c in plan.chunks:
            view = offsets[begin : begin + c.offsets.numel()].view(c.offsets.shape)
            chunks.append(replace(c, offsets=view))
            begin += c.offsets.numel()
        return replace(plan, offsets=offsets, chunks=tuple(chunks))

    for sample in (8, 24, 600, 5000):
        cases = make_cases("normal", (torch.float32,))[3:]
        rows, _, plan = run(cases, probe_type, sample=sample, change_plan=longer)
        assert_rows(rows, cases, plan)


def test_strides_and_shards(probe_type: Callable[..., Probe]) -> None:
    w, g = torch.randn(60, 70), torch.randn(60, 70)
    flipped = torch.randn(70, 60).t()
    gaps = torch.randn(120, 140)[::2, ::2]
    images = torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last)
    cases = [
        Case(w, w + 1e-3, flipped),
        Case(flipped, flipped + 1e-3, g),
        Case(gaps, gaps + 1e-3, gaps),
        Case(images, images + 1e-3, None),
    ]
    rows, _, plan = run(cases, probe_type)
    assert_rows(rows, cases, plan)
    whole = torch.randn(3000)
    half = Case(whole[1500:], whole[1500:] + 1e-3, whole[1500:] * 2, region=_SecondHalf(1500))
    for exact in (False, True):
        assert_probes_agree([half, *cases], probe_type, TorchProbe, 1024, exact)


def test_a_parameter_that_is_elsewhere_leaves_a_row_that_adds_nothing(
    probe_type: Callable[..., Probe],
) -> None:
    x = torch.randn(50)
    cases = [Case(x[:0], x[:0], None, region=_Nowhere()), Case(x, x + 1, x)]
    for exact in (False, True):
        rows, probe, _ = run(cases, probe_type, exact=exact)
        assert not rows.sums[0].any()
        assert torch.equal(rows.maxima[0], torch.full((len(MAX_COLUMNS),), -torch.inf))
        assert not rows.bins[0].any()
        assert int(probe.row_checksums[0]) == 0


@pytest.mark.parametrize("words", BIN_WORDS)
def test_bins_are_packed_into_any_number_of_words(
    words: int, probe_type: Callable[..., Probe]
) -> None:
    cases = make_cases("extreme", (torch.float32,))
    rows, _, plan = run(cases, probe_type, words=words)
    assert_rows(rows, cases, plan)
    rows, _, _ = run(cases, probe_type, words=words, exact=True)
    expected, _, _ = run(cases, TorchProbe, words=words, exact=True)
    assert torch.equal(rows.bins, expected.bins)


def test_no_bins_and_the_same_bits_twice(probe_type: Callable[..., Probe]) -> None:
    cases = make_cases("extreme", (torch.bfloat16,))
    for exact in (False, True):
        first, _, plan = run(cases, probe_type, bins=False, exact=exact)
        again, _, _ = run(cases, probe_type, bins=False, exact=exact)
        assert torch.equal(first.sums, again.sums)
        assert torch.equal(first.maxima, again.maxima)
    rows, _, plan = run(cases, probe_type, bins=False)
    assert_rows(rows, cases, plan)


def test_gradients_that_move_come_and_go_are_followed(probe_type: Callable[..., Probe]) -> None:
    weight = torch.randn(100)
    case, other = Case(weight, weight, torch.randn(100)), Case(weight, weight, None)
    _, probe, plan = run([case, other], probe_type)
    case.grad, other.grad = None, torch.randn(100, dtype=torch.bfloat16)
    rows = poisoned_rows(2)
    probe.measure(rows, torch.ones(2, dtype=torch.float64))
    assert_rows(rows, [case, other], plan)


def test_strides_that_change_at_the_same_address(probe_type: Callable[..., Probe]) -> None:
    weight, memory = torch.randn(12, 10), torch.randn(2000)
    case = Case(weight, weight, memory.as_strided((12, 10), (80, 1)))
    _, probe, plan = run([case], probe_type)
    for strides in ((1, 12), (100, 7)):
        case.grad = memory.as_strided((12, 10), strides)
        rows = poisoned_rows(1)
        probe.measure(rows, torch.ones(1, dtype=torch.float64))
        assert_rows(rows, [case], plan)


def test_a_tensor_that_could_not_be_placed_is_not_read_later(
    probe_type: Callable[..., Probe],
) -> None:
    """What was placed before an error may be freed by the next observation."""
    flipped = [torch.randn(30, 40).t() for _ in range(2)]
    cases = [Case(x, x, x) for x in flipped]
    _, probe, plan = run(cases, probe_type)
    assert isinstance(probe, NativeProbe)
    placed: list[int] = []
    place = probe._reader.place

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(reader, name)

        def place(self, *arguments: object) -> None:
            placed.append(1)
            if len(placed) == 2:
                raise MemoryError
            place(*arguments)

    reader = probe._reader
    probe._reader = Failing()  # type: ignore[assignment]
    rows = poisoned_rows(2)
    with pytest.raises(MemoryError):
        probe.measure(rows, torch.ones(2, dtype=torch.float64))
    probe._reader = reader
    missing = reader.measure(
        *(False, 1, False, 0, 0, np.ones(2), rows.sums.numpy(), rows.maxima.numpy(), None),
        np.zeros(2, np.int64),
    )
    assert missing == ([0, 1], [0, 1])
    for case in cases:
        case.grad = torch.randn(40, 30)
    probe.measure(rows, torch.ones(2, dtype=torch.float64))
    assert_rows(rows, cases, plan)


def test_updates_that_are_not_finite(probe_type: Callable[..., Probe]) -> None:
    before = torch.tensor([torch.inf, torch.nan, -3e38, 1.0, 2.0, -torch.inf])
    after = torch.tensor([1.0, 2.0, 3e38, torch.nan, 2.0, -torch.inf])
    case = Case(before, after, torch.ones(6))
    rows, _, plan = run([case], probe_type)
    assert_rows(rows, [case], plan)
    assert rows.sums[0, SUM["u_lost"]] == 4
    assert_probes_agree([case], probe_type, TorchProbe, 64, False)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_columns_of_every_dtype_and_size(kind: str, probe_type: Callable[..., Probe]) -> None:
    cases = []
    dtypes = (*DTYPES["kept as fp32"], torch.float64)
    for d, dtype in enumerate(dtypes):
        for s, size in enumerate((*SIZES, 2**17 + 3)):
            weight = off_boundary(numbers(kind, size, dtype, 10 * d + s), (d + s) % 3)
            of = torch.bfloat16 if weight.element_size() == 1 else dtype
            grad = numbers(kind, size, of, 10 * d + s + 1)
            cases.append(
                Case(weight, weight, None if (d + s) % 4 == 3 else grad, float((d + s) % 5 != 4))
            )
    rows, _, plan = run(cases, probe_type, sample=8, exact=True)
    # Chains of 64 in a piece, 512 pieces in a block, 2 blocks, 4 lanes; the square is rounded too.
    assert_exact(rows, cases, plan.dtype, roundings=64 + 512 + 2 + 4 + 1)


def test_whole_gradients_are_counted(probe_type: Callable[..., Probe]) -> None:
    grad = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    rows, probe, _ = run([Case(grad, grad, grad), Case(grad, grad, None)], probe_type)
    probe.read_whole_gradients(rows, [0, 1])
    assert rows.sums[:, SUM["whole_count"]].tolist() == [4, 4]
    assert rows.sums[:, SUM["whole_nonzero"]].tolist() == [2, 0]


def _planned(dtype: torch.dtype = torch.float32) -> tuple[SamplePlan, list[object]]:
    shards = [plain_shard("w", torch.nn.Parameter(torch.randn(20).to(dtype), False))]
    return build_plan(shards, Reading(8), 0, CPU), shards


@pytest.mark.usefixtures("native")
def test_it_is_chosen_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    for backend in ("auto", "native"):
        assert isinstance(choose_probe(backend, *_planned()), NativeProbe)
    with caplog.at_level(logging.WARNING, "distmon"):
        strange = _planned(torch.float8_e4m3fnuz)
        assert isinstance(choose_probe("auto", *strange), TorchProbe)
    (line,) = caplog.messages
    assert "torch instead of the native module" in line
    assert "not float8_e4m3fnuz" in line
    with pytest.raises(ConfigError, match=r"backend: native cannot be used: .*float8_e4m3fnuz"):
        choose_probe("native", *strange)


@pytest.mark.usefixtures("cache")
def test_a_demand_that_cannot_be_met_is_one_sentence() -> None:
    plan, shards = _planned()
    with pytest.raises(ConfigError, match="it is not built"):
        choose_probe("native", plan, shards)
    with pytest.raises(ConfigError, match="needs a model on the CPU and this one is on cuda"):
        choose_probe("native", replace(plan, device=torch.device("cuda", 0)), shards)


@pytest.mark.usefixtures("native")
def test_a_monitor_records_the_same_through_it(tmp_path: Path) -> None:
    def observe(backend: str) -> dict[str, np.ndarray]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = distmon.attach(
            model, optimizer, run_dir=tmp_path / backend, sinks=[], interval=1, backend=backend
        )
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 40)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        monitor.close()
        assert len(capture(model)) == 4
        assert monitor.last_record is not None
        return monitor.last_record.params.columns

    mine, theirs = observe("native"), observe("torch")
    assert mine.keys() == theirs.keys()
    for name, column in mine.items():
        np.testing.assert_allclose(column, theirs[name], rtol=1e-12, err_msg=name)


class _Slice:
    """A shard that holds a short range of a parameter."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end

    def local(self, indices: np.ndarray) -> np.ndarray:
        inside = (indices >= self._begin) & (indices < self._end)
        return np.where(inside, indices - self._begin, -1)

    def bounds(self, _: int) -> tuple[int, int]:
        return self._begin, self._end

    def key(self) -> str:
        return f"{self._begin}-{self._end}"


@pytest.mark.parametrize("dtype", sorted(DTYPE_CODES, key=str))
def test_runs_of_gradients_of_every_dtype(
    dtype: torch.dtype, probe_type: Callable[..., Probe]
) -> None:
    gradient = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(700, 700)
    case = Case(weight, weight + 1e-3, gradient.to(dtype))
    for grad in (case.grad, case.grad.t().contiguous().t()):
        assert_probes_agree([replace(case, grad=grad)], probe_type, TorchProbe, 1024, False)


def test_runs_of_a_shard_without_a_sample_of_the_weight(probe_type: Callable[..., Probe]) -> None:
    found = 0
    for begin in range(0, 400_000, 8_000):
        weight = torch.zeros(160)
        gapped = torch.full((160, 4), 1e6)
        gapped[:, 0] = torch.arange(160.0)
        shard = Case(weight, weight + 1e-3, gapped[:, 0], region=_Slice(begin, begin + 160))
        shard = replace(shard, global_shape=(1000, 400))
        rows, _, plan = run([shard], probe_type, sample=8)
        found += not len(plan.chunks)
        assert float(rows.sums[0, SUM["g_sq0"] : SUM["g_sq0"] + 8].sum()) < 160.0**3
    assert found > 10, "most of these shards have runs of the gradient only"


def test_small_numbers_count_where_the_processor_flushes_them(
    probe_type: Callable[..., Probe],
) -> None:
    weight = torch.zeros(4000, dtype=torch.float16)
    case = Case(weight, weight, torch.full((4000,), 3e-6, dtype=torch.float16))
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        rows, _, _ = run([case], probe_type)
    finally:
        torch.set_flush_denormal(False)
    first = SUM["g_sq0"]
    expected = float(case.grad.double().square().sum())
    assert float(rows.sums[0, first : first + 8].sum()) == pytest.approx(expected)


def test_threads_do_not_change_a_bit(probe_type: Callable[..., Probe]) -> None:
    generator = torch.Generator().manual_seed(1)
    long = torch.randn(9001, 100, generator=generator)  # its runs are those of several threads
    short = [torch.randn(40, 50, generator=generator) for _ in range(40)]
    cases = [Case(x, x + 1e-3, x * 1e-4) for x in (*short[:20], long, *short[20:])]
    cases.append(Case(long.double(), long.double() + 1e-3, long.double()))
    cases[0] = replace(cases[0], grad=cases[0].grad * 1e-36)  # some are denormal
    threads = torch.get_num_threads()
    for exact in (False, True):
        for flush in (False, torch.set_flush_denormal(True)):
            found = []
            try:
                torch.set_flush_denormal(flush)
                for count in (1, 2, 5):
                    torch.set_num_threads(count)
                    rows, probe, _ = run(cases, probe_type, exact=exact)
                    found.append((rows.sums, rows.maxima, rows.bins, probe.row_checksums))
            finally:
                torch.set_num_threads(threads)
                torch.set_flush_denormal(False)
            for others in found[1:]:
                for one, other in zip(found[0], others, strict=True):
                    assert torch.equal(one, other)


def test_runs_shared_by_threads_are_those_of_the_torch_probe(
    probe_type: Callable[..., Probe],
) -> None:
    generator = torch.Generator().manual_seed(2)
    cases = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(9001, 100, generator=generator).to(dtype)
        x[1000, 3], x[8999, 8] = torch.nan, torch.inf
        cases += [Case(x, x, x), Case(x[:30], x[:30], x[:30]), Case(x, x, None)]
    assert_probes_agree(cases, probe_type, TorchProbe, 1024, False)
