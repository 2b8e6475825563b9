"""FLOPs counted in a real step are the useful ones, on a CPU too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from mfu_models import SMALL, Decoder, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode

from distmon.collect.telemetry.mfu import counting
from distmon.collect.telemetry.mfu.counting import UsefulFlops, count_flops
from distmon.collect.telemetry.mfu.measured_peak import measure_peak
from distmon.collect.telemetry.mfu.peaks import Peak
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.collect.telemetry.mfu.utilization import Mfu
from distmon.collect.telemetry.utilization import Utilization

SEQUENCES = 16
IDS = torch.zeros(SEQUENCES, SMALL.context, dtype=torch.long)
TOKENS = SEQUENCES * SMALL.context


@pytest.mark.parametrize("causal", [True, False])
def test_the_count_on_a_cpu_agrees_with_the_formula(causal: bool) -> None:
    counted = count_flops(lambda: train(Decoder(SMALL), IDS), TOKENS, causal)
    assert counted.value == pytest.approx(SMALL.flops(causal).value, rel=0.02)
    assert counted.causal is causal
    word = "causal" if causal else "full"
    assert counted.description == f"counted in one step, {word} attention"


def test_attention_without_a_causal_mask_gets_no_discount() -> None:
    for mask in ("none", "given"):
        counted = count_flops(lambda mask=mask: train(Decoder(SMALL, mask), IDS), TOKENS, True)
        assert counted.value == pytest.approx(SMALL.flops(causal=False).value)
        assert counted.causal is False
        assert counted.description == "counted in one step, no causal attention seen"


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_layers_that_are_computed_again_count_once(recompute: str) -> None:
    model = Decoder(SMALL, recompute=recompute)
    model.embed.register_forward_hook(lambda *args: args[2].requires_grad_())
    with UsefulFlops() as counted:
        train(model, IDS)
    assert counted.per_token(TOKENS, True).value == pytest.approx(SMALL.flops(True).value)
    # A block's forward is a third of its work, and there is the head.
    assert 0.2 < counted.recomputed / counted.total < 0.34


def test_the_same_work_in_1_4_and_16_parts_gives_the_same_mfu() -> None:
    peak = Peak(1e12, "fp32", "given by the user")
    readings = set()
    for micro_batches in (1, 4, 16):
        model = Decoder(SMALL)
        flops = count_flops(lambda m=model, n=micro_batches: train(m, IDS, n), TOKENS, True)
        assert flops.value == pytest.approx(SMALL.flops(True).value)
        # One optimizer step of all sequences in two seconds, however it was cut.
        readings.add(Mfu(flops, peak).value(TOKENS / 2.0, devices=2))
    assert len(readings) == 1
    assert readings.pop() == pytest.approx(SMALL.flops(True).value * TOKENS / 2.0 / 2e12)


@pytest.mark.parametrize("optimizers", [0, 1, 2])
def test_counting_ends_with_the_step(optimizers: int) -> None:
    """Also when a scaler skips it, and when several optimizers take it one after the other."""
    utilization = Utilization()
    utilization.count_once(Peak(1e12, "fp32", "given by the user"), causal=True)
    for _ in range(2):
        utilization.begin_step()
        train(Decoder(SMALL), IDS)
        for _ in range(optimizers):
            utilization.end_backward()
        utilization.end_step(TOKENS)
        assert _get_current_dispatch_mode() is None
    assert utilization.mfu is not None
    counted = utilization.mfu.provenance.flops
    assert counted.value == pytest.approx(SMALL.flops(causal=True).value)


def test_a_counter_that_fails_does_not_reach_the_training_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: UsefulFlops) -> None:
        raise RuntimeError("another mode is active")

    monkeypatch.setattr(UsefulFlops, "__enter__", broken)
    utilization = Utilization()
    utilization.count_once(Peak(1e12, "fp32", "given by the user"), causal=True)
    for _ in range(2):
        utilization.begin_step()
        utilization.end_backward()
        utilization.end_step(TOKENS)
    assert utilization.mfu is None
    assert caplog.text.count("no MFU: counting FLOPs failed: RuntimeError: another mode") == 1


def test_a_weight_that_is_not_trained_costs_less() -> None:
    model = Decoder(SMALL)
    model.head.requires_grad_(False)
    counted = count_flops(lambda: train(model, IDS), TOKENS, True)
    assert counted.value == pytest.approx(SMALL.flops(True).value - 2 * 32 * 64)


def test_a_counter_counts_anew_each_time() -> None:
    model, counter = Decoder(SMALL), UsefulFlops()
    with counter:
        train(model, IDS)
    first = (counter.total, counter.causal_attention)
    with counter:
        train(model, IDS)
    assert (counter.total, counter.causal_attention) == first


def test_a_step_without_products_or_tokens_is_refused() -> None:
    with pytest.raises(MfuUnavailableError, match="nothing was counted"):
        count_flops(lambda: None, TOKENS, True)
    with pytest.raises(MfuUnavailableError, match="had no tokens"):
        count_flops(lambda: train(Decoder(SMALL), IDS), 0, True)


def test_a_fault_in_counting_does_not_reach_the_training_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setattr(counting, "flop_registry", {torch.ops.aten.mm: broken})
    counter = UsefulFlops()
    layer = nn.Linear(4, 4, bias=False)
    with counter:
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(MfuUnavailableError, match="counting FLOPs failed: shapes are incompat"):
        counter.per_token(2, True)


@pytest.fixture
def two_ranks_in_name() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks_in_name")
def test_layers_split_over_devices_are_not_counted_by_half() -> None:
    model = Decoder(SMALL)
    for block in model.blocks:
        parallelize_module(
            block,
            init_device_mesh("cpu", (2,)),
            {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            | {"attention.out": RowwiseParallel()},
        )
    with pytest.raises(MfuUnavailableError, match="layers are sharded over devices"):
        count_flops(lambda: train(model, IDS), TOKENS, True)


def test_the_peak_of_this_cpu_can_be_measured() -> None:
    peak = measure_peak(torch.device("cpu"), "fp32", seconds=0.1)
    assert peak.source == "measured, 512 x 512 matrix product"
    assert 1e8 < peak.flops < 1e14
