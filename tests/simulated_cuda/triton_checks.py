"""The Triton probe on the simulated device: interpreted kernels in the order of the streams."""

from __future__ import annotations

import torch
from torch import nn

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.inside.activation_rows import UNBOUNDED, add_activation
from distmon.collect.inside.catalog import ACTIVATION_MAXIMA, ACTIVATION_SUMS, UNIT_SLOTS
from distmon.layout.capture import capture
from distmon.layout.units import LocalActivation
from distmon.probe.exact import nonfinite_counts
from distmon.probe.rows import Rows
from distmon.probe.torch_probe import TorchProbe
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from simulated_cuda import interpreted_kernels
from simulated_cuda.device import launches, set_order, take_waits

interpreted_kernels.install()


def made(where: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 4)).to(where)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def empty_rows(count: int, where: torch.device) -> Rows:
    return Rows(
        torch.zeros((count, len(SUM_COLUMNS)), dtype=torch.float64, device=where),
        torch.zeros((count, len(MAX_COLUMNS)), device=where),
        torch.zeros((count, BINS), dtype=torch.float64, device=where),
    )


def measured(where: str, probe_type: type) -> tuple[Rows, list[str]]:
    """Return the rows of two observations in a row, gradients moving in between."""
    model = made(where)
    shards = capture(model)
    device = shards[0].weight().device
    plan = build_plan(shards, Reading(whole_gradients=True), 0, device)
    probe = probe_type(plan, shards)
    rows = empty_rows(len(shards), device)
    applied = torch.ones(len(shards), dtype=torch.float64, device=device)
    take_waits()
    for turn in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + turn)
        probe.snapshot()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.01)
        probe.measure(rows, applied)
    return rows, take_waits()


def check_rows_are_those_of_torch_in_every_order() -> None:
    expected, _ = measured("cpu", TorchProbe)
    for where, seed in (("cuda:0", 0), ("cuda:1", 0), ("cuda:1", 3), ("cuda:0", 2)):
        set_order(seed)
        rows, waits = measured(where, TritonProbe)
        assert not waits, waits
        torch.testing.assert_close(rows.sums.cpu(), expected.sums, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(rows.maxima.cpu(), expected.maxima, rtol=1e-6, atol=1e-9)
        assert rows.bins is not None
        assert torch.equal(rows.bins.cpu(), expected.bins)


def check_the_table_is_uploaded_from_a_buffer_that_is_free() -> None:
    """Gradients move at every step, and no copy has run yet: each upload needs its own buffer."""
    model = made("cuda:1")
    shards = capture(model)
    plan = build_plan(shards, Reading(), 0, torch.device("cuda", 1))
    probe = TritonProbe(plan, shards)
    tables = []
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        probe._addresses.refresh(grads=True)
        tables.append(probe._addresses.table.clone())
    kept = [buffer for buffer, _ in probe._addresses._staging]
    assert len({buffer.data_ptr() for buffer in kept}) == len(kept) >= 3
    torch.accelerator.synchronize(1)
    grads = [p.grad.data_ptr() for p in model.parameters()]
    assert tables[-1][:, 3].tolist() == grads
    probe._addresses.refresh(grads=True)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    probe._addresses.refresh(grads=True)
    assert len(probe._addresses._staging) == len(kept)  # the copies have run: taken again


def check_one_launch_of_each_kernel_for_all_parameters() -> None:
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(30)]).to("cuda")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    shards = capture(model)
    plan = build_plan(shards, Reading(sample_size=8), 0, torch.device("cuda", 0))
    probe = TritonProbe(plan, shards)
    rows = empty_rows(len(shards), torch.device("cuda", 0))
    applied = torch.ones(len(shards), dtype=torch.float64, device="cuda")
    probe.snapshot()
    with launches() as names:
        probe.snapshot()
        probe.measure(rows, applied)
    kernels = [name for name in names if name.endswith("kernel")]
    assert len(kernels) == len({*kernels}) <= 4, kernels
    assert len(names) <= 8, names


def check_counting_nan_is_one_launch_and_one_wait() -> None:
    model = made("cuda:1")
    last = [*model.parameters()][-1]
    with torch.no_grad():
        model[0].weight[3, :5] = torch.nan
        model[0].weight.grad = torch.full((16, 24), torch.inf, device="cuda:1").t()[:24].t()
        last[1] = -torch.inf
    last.grad = None
    shards = capture(model)
    plan = build_plan(shards, Reading(), 0, torch.device("cuda", 1))
    probe = TritonProbe(plan, shards)
    torch.accelerator.synchronize(1)
    take_waits()
    with launches() as names:
        counts = probe.count_nonfinite()
    waits = take_waits()
    assert len(waits) == 1, waits
    assert [n for n in names if n.endswith("kernel")] == ["nonfinite_counts_kernel"], names
    assert torch.equal(counts, nonfinite_counts(shards))
    assert counts.sum(0).tolist() == [5, 1, 0, 16 * 24]


def strided(where: str, whole: bool, probe_type: type) -> Rows:
    """Return the rows of weights and gradients that are transposed, or have gaps."""
    model = made(where)
    device = model[0].weight.device
    wide = torch.arange(16 * 48.0, device=device).view(16, 48)
    with torch.no_grad():
        model[0].weight.set_(model[0].weight.t().contiguous().t())
    model[0].weight.grad = wide[:, ::2]
    model[1].weight.grad = torch.arange(64.0, device=device).view(16, 4).t()
    shards = capture(model)
    reading = Reading(whole_gradients=whole, sample_size=16)
    plan = build_plan(shards, reading, 0, device)
    probe, rows = probe_type(plan, shards), empty_rows(len(shards), device)
    probe.snapshot()
    with torch.no_grad():
        model[0].weight.add_(0.5)
    probe.measure(rows, torch.ones(len(shards), dtype=torch.float64, device=device))
    return rows


def check_strided_tensors_are_read_as_torch_reads_them() -> None:
    for whole in (True, False):
        expected = strided("cpu", whole, TorchProbe)
        for seed in (0, 2):
            set_order(seed)
            rows = strided("cuda:1", whole, TritonProbe)
            torch.testing.assert_close(rows.sums.cpu(), expected.sums, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(rows.maxima.cpu(), expected.maxima, rtol=1e-6, atol=1e-9)


def sampled_runs(where: str, probe_type: type) -> Rows:
    """Return the rows of a gradient that is sampled, transposed since the probe was made."""
    torch.manual_seed(0)
    model = nn.Linear(128, 96).to(where)
    gradient = torch.randn(128, 96).to(where)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    shards, device = capture(model), model.weight.device
    plan = build_plan(shards, Reading(), 0, device)
    probe, rows = probe_type(plan, shards), empty_rows(len(shards), device)
    applied = torch.ones(len(shards), dtype=torch.float64, device=device)
    for turn in range(2):
        probe.snapshot()
        probe.measure(rows, applied)
        model.weight.grad = gradient.t() if turn == 0 else model.weight.grad
    return rows


def check_sampled_gradients_are_those_of_torch_in_every_order() -> None:
    expected = sampled_runs("cpu", TorchProbe)
    for where, seed in (("cuda:1", 0), ("cuda:0", 2)):
        set_order(seed)
        rows = sampled_runs(where, TritonProbe)
        torch.testing.assert_close(rows.sums.cpu(), expected.sums, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(rows.maxima.cpu(), expected.maxima, rtol=1e-6, atol=1e-9)


def check_activations_are_those_of_torch_in_every_order() -> None:
    def added(where: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        values = torch.randn(6, 5, 40).to(where)
        sums = torch.zeros(len(ACTIVATION_SUMS), dtype=torch.float64, device=where)
        maxima = torch.full((len(ACTIVATION_MAXIMA) + UNIT_SLOTS,), -torch.inf, device=where)
        for _ in range(2):
            values = values * 1.5
            add_activation(LocalActivation(values, 2, 0, 40), sums, maxima, UNBOUNDED)
        return sums.cpu(), maxima.cpu()

    expected = added("cpu")
    for where, seed in (("cuda:0", 0), ("cuda:1", 0), ("cuda:1", 3), ("cuda:0", 2)):
        set_order(seed)
        torch.testing.assert_close(added(where), expected, rtol=1e-5, atol=1e-6)
