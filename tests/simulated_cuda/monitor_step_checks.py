"""The monitor on the simulated device, one process: what its steps wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import distmon
from distmon.collect.finite_watch import FiniteWatch
from distmon.layout.plain import plain_shard
from distmon.probe.exact import nonfinite_counts
from simulated_cuda.device import launches, take_waits
from simulated_cuda.observed_training import (
    adamw,
    equal,
    made_model,
    observe,
    settings,
    train,
)

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
