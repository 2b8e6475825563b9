"""The monitor on the simulated device, one process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

import distmon
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.losses import Arriving, LossRing
from distmon.collect.telemetry.phases import PhaseClock, marks_for
from distmon.device import DeviceMark
from distmon.layout.plain import plain_shard
from distmon.probe.exact import nonfinite_counts
from simulated_cuda.device import launches, set_order, take_waits
from simulated_cuda.observed_training import (
    adamw,
    comparable,
    made_model,
    observe,
    settings,
    train,
)

CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def equal(found: Any, expected: Any) -> None:
    assert str(found) == str(expected), f"\n{found}\n{expected}"  # NaN equals itself as text


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


# ---------------------------------------------------------------- no step waits


def waits_of_steps(report: Any, keeps_up: bool = True, **overrides: Any) -> list[list[str]]:
    """Return what each `step()` and each hook waited for, after the first step."""
    model, options = made_model("cuda"), settings(**overrides)
    optimizer = adamw(model)
    found = []
    with distmon.attach(model, optimizer, **options) as monitor:
        for step in range(1, 10):
            loss = model(torch.ones(4, 32, device="cuda")).square().mean()
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            given = report(loss.detach(), norm)
            take_waits()
            monitor.check(grad_norm=norm)
            optimizer.step()
            monitor.step(**given)
            waited = take_waits()
            if step > 1:
                found.append(waited)
            optimizer.zero_grad()
            if keeps_up:
                torch.accelerator.synchronize()
    return found


def check_no_step_waits_with_numbers_of_the_device() -> None:
    def report(loss: torch.Tensor, norm: torch.Tensor) -> dict[str, Any]:
        tokens = torch.full((), 64, device="cuda")
        lr = torch.full((), 1e-3, device="cuda")
        return {"loss": loss, "grad_norm": norm, "tokens": tokens, "samples": tokens, "lr": lr}

    equal(waits_of_steps(report), [[]] * 8)
    equal(waits_of_steps(report, interval=1), [[]] * 8)


def check_a_device_that_falls_behind_is_waited_for_at_pick_up_only() -> None:
    found = waits_of_steps(lambda loss, _: {"loss": loss}, keeps_up=False)
    assert all(waited in ([], ["event"]) for waited in found), found
    assert sum(map(len, found)) <= 3, found


def check_tokens_of_the_device_are_counted() -> None:
    def run(as_tensor: bool) -> Any:
        model, options = made_model("cuda"), settings()
        optimizer = adamw(model)

        def report(loss: torch.Tensor) -> dict[str, Any]:
            tokens = torch.full((), 64, device="cuda") if as_tensor else 64
            lr = torch.full((), 0.25, device="cuda") if as_tensor else 0.25
            return {"loss": loss, "tokens": tokens, "samples": tokens, "lr": lr}

        with distmon.attach(model, optimizer, **options) as monitor:
            after = torch.accelerator.synchronize
            train(model, [optimizer], monitor, range(1, 10), report=report, after=after)
        return distmon.read_run(options["run_dir"]).records

    for record, expected in zip(run(True), run(False), strict=True):
        for name in ("tokens", "samples"):
            equal(record["ranks"][name], expected["ranks"][name])
        assert record["metrics"]["train/lr"] == expected["metrics"]["train/lr"] == 0.25


def check_a_learning_rate_of_the_device_is_not_waited_for() -> None:
    model = made_model("cuda")
    optimizer = adamw(model, capturable=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="cuda")
    options = settings()
    with distmon.attach(model, optimizer, **options) as monitor:
        take_waits()
        for step in range(1, 10):
            model(torch.ones(4, 32, device="cuda")).square().mean().backward()
            optimizer.step()
            take_waits()
            monitor.step()
            assert step == 1 or not take_waits()
            torch.accelerator.synchronize()
            optimizer.param_groups[0]["lr"].mul_(0.5)
    run = distmon.read_run(options["run_dir"])
    rates = [record["metrics"]["train/lr"] for record in run.records]
    assert rates == [0.125, 0.015625, 0.001953125], rates


# ---------------------------------------------------------------- NaN


def check_a_nan_is_located() -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 4:
            model[1].inner.weight.grad[0, :2] = torch.nan

    for where in ("cpu", "cuda", "cuda:1"):
        run = observe(where, spoil=spoil)
        found = next(r["nonfinite"] for r in run.records if r.get("nonfinite"))
        names = [place["param"] for place in found["places"]]
        assert names[0] == "0.norm.weight" or "1.inner.weight" in names, found


def check_a_sampled_nan_says_when_it_was_counted() -> None:
    """Nothing is reported: a NaN in a sample is known when the observation has arrived."""

    def counted_at(where: str) -> list[int]:
        model, options = made_model(where), settings()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def spoil(step: int, model: nn.Module) -> None:
            if step == 3:
                with torch.no_grad():
                    model[0].inner.weight.fill_(torch.nan)

        with distmon.attach(model, optimizer, **options) as monitor:
            steps, after = range(1, 9), torch.accelerator.synchronize
            train(model, [optimizer], monitor, steps, spoil, lambda _: {}, after)
        found = [r["nonfinite"] for r in distmon.read_run(options["run_dir"]).records]
        assert found[0]["step"] == 3, found
        assert found[0]["signal"] == "sample", found
        return [each["counted_at"] for each in found if each]

    equal(counted_at("cpu"), [0])
    later = counted_at("cuda")
    assert later[0] > 3, later


def check_evidence_says_when_it_was_counted() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    watch = FiniteWatch(lambda: nonfinite_counts([plain_shard("w", weight)]))
    watch.report(1, loss=torch.full((), torch.nan, device="cuda"))
    for step in (1, 2):
        watch.complete_step(step, None, None)
        assert watch.evidence is None
    weight.data.fill_(torch.nan)
    torch.accelerator.synchronize()
    watch.complete_step(3, None, None)
    assert watch.evidence is not None
    assert (watch.evidence.step, watch.evidence.counted_at) == (1, 3)
    assert watch.evidence.counts.tolist() == [[4, 0, 0, 0]]


def check_counting_nan_waits_once() -> None:
    weights = [nn.Parameter(torch.ones(300_000, device="cuda")) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    weights[1].grad[7] = torch.inf
    weights[2].data[:5] = torch.nan
    take_waits()
    counts = nonfinite_counts([plain_shard(str(i), w) for i, w in enumerate(weights)])
    assert len(take_waits()) == 1
    assert counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [5, 0, 0, 0]]


# ---------------------------------------------------------------- graphs and compiled steps


def captured_training(interval: int, calls_hooks: bool) -> Any:
    """Train by replaying a graph of the whole step."""
    model, options = made_model("cuda"), settings(interval=interval)
    optimizer = adamw(model, capturable=True)
    inputs = torch.ones(4, 32, device="cuda")
    with distmon.attach(model, optimizer, **options) as monitor:

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            monitor.check(loss=loss)
            loss.backward()
            optimizer.step()
            return loss

        monitor.step(loss=step())
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # raises when a call was not permitted
            loss = step()
        for _ in range(5):
            if calls_hooks:
                monitor.before_step()
            graph.replay()
            if calls_hooks:
                monitor.after_step()
            monitor.step(loss=loss)
            torch.accelerator.synchronize()
    return distmon.read_run(options["run_dir"])


def check_hooks_do_nothing_while_a_graph_is_captured() -> None:
    for interval, calls_hooks in ((1, True), (1, False), (50, False)):
        run = captured_training(interval, calls_hooks)
        observed = [record for record in run.records if not record["partial"]]
        assert len(observed) == (6 if interval == 1 else 0)
        assert not any(r["metrics"]["train/skipped_steps"] for r in observed)
        if calls_hooks:
            assert run.records[-1]["metrics"]["monitor/update_ratio_median"] > 0


def check_compiling_the_optimizer_step_is_left_alone() -> None:
    from torch._dynamo.utils import counters

    def compiles(monitored: bool) -> tuple[list[int], int]:
        torch._dynamo.reset()
        counters.clear()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = distmon.attach(model, optimizer, **settings()) if monitored else None
        step = torch.compile(optimizer.step, backend="eager")
        counted = []
        for _ in range(12):
            model(torch.ones(2, 4)).sum().backward()
            step()
            if monitor is not None:
                monitor.step()
            counted.append(counters["frames"]["ok"])
        if monitor is not None:
            monitor.close()
            assert monitor.last_record.metrics["monitor/update_ratio_median"] > 0
        return counted, counters["stats"]["unique_graphs"]

    (_, graphs), (frames, observed) = compiles(False), compiles(True)
    assert frames[-1] == frames[1], frames
    assert observed == graphs


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


# ---------------------------------------------------------------- many optimizers


def check_an_optimizer_per_parameter_costs_one_snapshot() -> None:
    def launched(optimizers_of: Any) -> int:
        model, options = made_model("cuda", blocks=6), settings(interval=1)
        optimizers = optimizers_of(model)
        with distmon.attach(model, optimizers, **options) as monitor:
            model(torch.ones(4, 32, device="cuda")).sum().backward()
            with launches() as names:
                for optimizer in optimizers:
                    optimizer.step()
                monitor.step()
        assert monitor.last_record.metrics["monitor/update_ratio_median"] > 0
        assert monitor.last_record.metrics["monitor/grad_norm"] > 0
        return len(names)

    one = launched(lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)])
    many = launched(
        lambda model: [torch.optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()]
    )
    assert many < 1.5 * one, (one, many)


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
