"""The monitor on the simulated device, one process: what it observes, and on which stream."""

from __future__ import annotations

import threading
from typing import Any

import torch

import distmon
from distmon.collect.losses import Arriving, LossRing
from distmon.collect.telemetry.phases import PhaseClock, marks_for
from distmon.device import DeviceMark
from simulated_cuda.device import launches, set_order
from simulated_cuda.observed_training import (
    adamw,
    comparable,
    equal,
    made_model,
    observe,
    settings,
    train,
)

CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


# ---------------------------------------------------------------- the same records as on the CPU


def check_records_are_those_of_the_cpu_in_every_order() -> None:
    expected = comparable(observe("cpu"))
    assert len(expected) == 3
    for seed in range(4):
        set_order(seed)
        equal(comparable(observe("cuda")), expected)


def check_records_of_a_device_that_is_not_the_current_one() -> None:
    expected = comparable(observe("cpu"))
    for seed in range(3):
        set_order(seed)
        assert torch.accelerator.current_device_index() == 0
        equal(comparable(observe(OTHER)), expected)


def check_observing_every_step() -> None:
    expected = comparable(observe("cpu", interval=1, steps=5))
    for seed in (0, 2):
        set_order(seed)
        equal(comparable(observe("cuda", interval=1, steps=5)), expected)


def check_two_optimizers() -> None:
    def run(where: str) -> list[Any]:
        model = made_model(where)
        groups = [[*model[0].parameters()], [p for part in model[1:] for p in part.parameters()]]
        optimizers = [torch.optim.SGD(group, lr=0.1 / (i + 1)) for i, group in enumerate(groups)]
        options = settings()
        with distmon.attach(model, optimizers, **options) as monitor:
            train(model, optimizers, monitor, range(1, 7))
        return comparable(distmon.read_run(options["run_dir"]))

    expected = run("cpu")
    for seed in (0, 1):
        set_order(seed)
        equal(run("cuda"), expected)


def check_a_resumed_run_continues() -> None:
    def run(where: str) -> list[Any]:
        model, options = made_model(where), settings()
        optimizer = adamw(model)
        with distmon.attach(model, optimizer, **options) as monitor:
            # Nothing is in flight when the state is taken.
            train(model, [optimizer], monitor, range(1, 6), after=torch.accelerator.synchronize)
            state = monitor.state_dict()
        with distmon.attach(model, optimizer, **options) as monitor:
            monitor.load_state_dict(state)
            train(model, [optimizer], monitor, range(6, 10))
        return comparable(distmon.read_run(options["run_dir"]))

    equal(run("cuda"), run("cpu"))


def check_close_delivers_what_is_in_flight() -> None:
    run = observe("cuda", steps=3)
    equal([record["step"] for record in run.records], [3])


def check_a_grad_scaler_on_the_device() -> None:
    model, options = made_model("cuda"), settings(interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with distmon.attach(model, optimizer, **options) as monitor:
        for step in range(1, 5):
            loss = model(torch.ones(4, 32, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            if step == 2:
                model[2].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step(loss=loss.detach())
    records = distmon.read_run(options["run_dir"]).records
    assert "monitor/grad_norm" not in records[0]["metrics"]
    assert records[1]["metrics"]["monitor/grad_norm"] > 0


# ---------------------------------------------------------------- streams and devices


def check_a_mark_is_on_the_stream_of_its_device() -> None:
    x = torch.ones(3, device=OTHER) * 2
    mark = DeviceMark(OTHER)
    assert not mark.done()
    mark.wait()
    assert mark.done()
    assert x.tolist() == [2, 2, 2]


def check_a_number_of_another_device_arrives() -> None:
    number = Arriving(torch.full((), 3.0, device=OTHER) * 2)
    assert not number.there()
    assert number.read() == 6.0


def check_a_mark_stands_for_the_copy_before_it() -> None:
    number = Arriving(torch.full((), 3.0, device=OTHER))
    while not number.there():
        pass
    assert number.read() == 3.0


def check_a_ring_of_losses_on_another_device() -> None:
    ring = LossRing(4, CUDA)
    for step, where in enumerate(("cuda:0", "cuda:1", "cpu"), 1):
        ring.add(step, torch.full((), float(step), device=where))
    assert ring.to_list() == [(1, 1.0), (2, 2.0), (3, 3.0)]


def check_observing_from_a_side_stream() -> None:
    expected = comparable(observe("cpu"))
    for seed in range(3):
        set_order(seed)
        side = torch.Stream(CUDA)
        side.wait_stream(torch.accelerator.current_stream(CUDA))
        with side:
            equal(comparable(observe("cuda")), expected)


# ---------------------------------------------------------------- gradient gain, phases, cost


def check_blocks_without_gradient_beside_blocks_on_another_device() -> None:
    from distmon.collect.gradient_gain import BackwardNorms, Blocks

    model = made_model("cuda")  # weights on the host, as with an offloaded optimizer
    modules = dict(model.named_modules())
    blocks = Blocks(("0", "1"), 2)
    norms = BackwardNorms(blocks, modules, torch.device("cpu"))
    norms.arm(True, first=False)
    norms.install()
    model[0].requires_grad_(False)
    x = torch.ones(2, 32, device="cuda")
    model(x).sum().backward()  # nothing before the second block has a gradient
    into = torch.zeros(norms.size, dtype=torch.float64)
    norms.send(into)
    table = into.view(len(blocks.names), -1)
    assert table[1, 2] > 0, table
    assert table[0, 2] > 0 or table[0, 3] == 0


def check_phases_are_kept_until_the_device_has_passed_them() -> None:
    clock = PhaseClock(marks_for(OTHER))
    x = torch.zeros(3, device=OTHER)
    clock.step_done(1, 1)
    for _ in range(3):
        clock.enter("forward")
        for _ in range(100):
            x.add_(1)
        clock.enter("backward")
        clock.step_done(1, 1)
        early = clock.take()  # every step is observed, and nothing has run yet
        assert not early
    torch.accelerator.synchronize(OTHER)
    seconds = clock.take()
    assert abs(seconds["forward_seconds"] - 1e-3) < 1e-9, seconds


def check_the_cost_has_the_time_of_the_device() -> None:
    run = observe("cuda", steps=9)
    seconds = [record["ranks"]["monitor_device_seconds"][0] for record in run.records]
    with launches() as names:
        observe("cuda", steps=3)
    assert len(names) > 100
    # An observation that was reduced is in the next record.
    assert 5e-4 < seconds[-1] < 0.1, seconds


def check_spectral_norms_are_those_of_an_svd() -> None:
    model, options = made_model(OTHER), settings(interval=1, inside=["spectra"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tables = []

    def after() -> None:
        torch.accelerator.synchronize()
        record = monitor.last_record
        if record is not None:
            assert not record.faults, record.faults
            tables.extend([record.inside["spectra"]] if "spectra" in record.inside else [])

    with distmon.attach(model, optimizer, **options) as monitor:
        train(model, [optimizer], monitor, range(1, 40), after=after)
    table = tables[-1]
    weights = dict(model.named_parameters())
    assert {"0.inner.weight", "1.inner.weight"} <= {*table.names}, table.names
    for name in table.names:
        norm = float(torch.linalg.matrix_norm(weights[name].detach().cpu(), 2))
        found = table.row(name)["spectral_norm"]
        assert abs(found - norm) <= 0.02 * norm, (name, found, norm)


# ---------------------------------------------------------------- threads


def check_attaching_in_a_thread_with_another_current_device() -> None:
    expected, found = comparable(observe("cpu")), []

    def work() -> None:
        torch.accelerator.set_device_index(1)
        found.append(comparable(observe("cuda:0")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    equal(found[0], expected)


def check_triton_is_refused_where_it_would_read_device_memory_on_the_host() -> None:
    import os

    import pytest

    from distmon.errors import ConfigError

    os.environ["TRITON_INTERPRET"] = "1"
    try:
        model = made_model("cuda")
        with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
            distmon.attach(model, adamw(model), **settings(backend="triton"))
        with distmon.attach(model, adamw(model), **settings(backend="auto")):
            pass
    finally:
        del os.environ["TRITON_INTERPRET"]


def check_the_self_test_passes_and_times_nothing() -> None:
    from distmon.selftest.__main__ import run
    from distmon.selftest.checks import all_checks
    from simulated_cuda.selftest import RANK_PROGRAM

    results = {each["check"]: each for each in run(CUDA, all_checks(RANK_PROGRAM))}
    for name in (
        "kernels against references",
        "records against the CPU",
        "transport: host",
        "transport: device",
        "graph capture",
    ):
        assert results[name]["result"] == "ok", results[name]
    assert results["timings"]["result"] == results["launches"]["result"] == "not checked"
    assert not any(each["result"] == "failed" for each in results.values()), results
