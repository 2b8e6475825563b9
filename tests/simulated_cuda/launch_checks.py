"""What Triton's launcher is asked to launch: kernels, devices, streams, and when it compiles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

import distmon
from distmon.collect.inside.activation_rows import UNBOUNDED, add_activation
from distmon.collect.inside.catalog import ACTIVATION_MAXIMA, ACTIVATION_SUMS, UNIT_SLOTS
from distmon.layout.units import LocalActivation
from simulated_cuda.device import take_waits
from simulated_cuda.observed_training import settings
from simulated_cuda.recorded_launches import Launch, take

OTHER = torch.device("cuda", 1)


def many_layers(count: int, dtype: Any = torch.float32, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(width, width) for _ in range(count // 2)]).to(OTHER, dtype)


def observed(
    model: nn.Module, optimizers: int = 1, grad_dtype: Any = None, **overrides: Any
) -> tuple[list[Launch], int]:
    """Return the launches of the second observation, and the kernels loaded after attach."""
    parameters = [*model.parameters()]
    shares = [parameters[i::optimizers] for i in range(optimizers)]
    made = [torch.optim.SGD(share, lr=0.1, foreach=True) for share in shares]
    options = settings(**{"backend": "triton", "interval": 1, **overrides})
    with distmon.attach(model, made, **options) as monitor:
        take()
        loaded = 0
        for _ in range(2):
            for p in parameters:
                if grad_dtype is not None:
                    p.grad_dtype = grad_dtype
                p.grad = torch.ones_like(p, dtype=grad_dtype)
            for optimizer in made:
                # Kernels do not run here, so the optimizer need not either: its hooks do.
                monitor.before_step(optimizer)
                monitor.after_step(optimizer)
            monitor.step()
            launches, loads = take()
            loaded += loads
    return launches, loaded


def check_the_number_of_launches_does_not_depend_on_the_number_of_parameters() -> None:
    few, _ = observed(many_layers(10))
    many, _ = observed(many_layers(10_000))
    kinds = Counter(launch.kernel for launch in few)
    assert kinds == Counter(launch.kernel for launch in many)
    assert max(kinds.values()) == 1, kinds
    assert len(few) <= 5, kinds
    assert sum(launch.grid for launch in many) > 10 * sum(launch.grid for launch in few)


def check_launches_are_on_the_device_and_stream_of_the_model() -> None:
    assert torch.accelerator.current_device_index() == 0
    side = torch.Stream(OTHER)
    with side:
        torch.accelerator.set_device_index(0)
        launches, _ = observed(many_layers(10))
    assert launches
    assert {(launch.device, launch.stream) for launch in launches} == {(1, side.stream_id)}


def check_nothing_compiles_after_attach() -> None:
    for dtype, grad_dtype in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ):
        for percentiles in (True, False):
            for sample_size in ("auto", "sampled"):
                _, loaded = observed(
                    many_layers(4, dtype, width=128),  # so wide that gradients are sampled
                    grad_dtype=grad_dtype,
                    percentiles=percentiles,
                    sample_size=sample_size,
                )
                assert not loaded, (dtype, grad_dtype, percentiles, sample_size)


def check_no_activation_compiles_after_attach() -> None:
    model = many_layers(4, width=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = settings(backend="triton", interval=1, inside=["activations"])
    with distmon.attach(model, optimizer, **chosen) as monitor:
        row = monitor.cycle.observer.inside.tables.activation(0)
        take()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for shape in ((3, 16, 1), (1, 7, 5), (64, 1, 16)):
                values = torch.ones(shape, dtype=dtype, device=OTHER)
                add_activation(LocalActivation(values, 1, 0, shape[1]), *row, UNBOUNDED)
        launches, loaded = take()
        assert len(launches) == 9
        assert not loaded


def check_an_optimizer_per_parameter_launches_once() -> None:
    one, _ = observed(many_layers(20))
    each, _ = observed(many_layers(20), optimizers=20)
    assert Counter(launch.kernel for launch in one) == Counter(launch.kernel for launch in each)


def check_no_observation_waits() -> None:
    model = many_layers(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **settings(backend="triton", interval=1)) as monitor:
        for step in range(1, 6):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            take_waits()
            monitor.before_step(optimizer)
            monitor.after_step(optimizer)
            monitor.step()
            assert step == 1 or not take_waits()
            torch.accelerator.synchronize(OTHER)


def check_activations_are_read_on_their_own_device() -> None:
    values = torch.ones(3, 4, 8, device=OTHER)
    sums = torch.zeros(len(ACTIVATION_SUMS), dtype=torch.float64, device=OTHER)
    maxima = torch.zeros(len(ACTIVATION_MAXIMA) + UNIT_SLOTS, device=OTHER)
    assert torch.accelerator.current_device_index() == 0
    take()
    add_activation(LocalActivation(values, 2, 0, 8), sums, maxima, UNBOUNDED)
    launches, _ = take()
    assert [(launch.kernel, launch.device) for launch in launches] == [
        ("activation_stats_kernel", OTHER.index)
    ], launches
