"""Train each width for a few steps, and measure how far every module's output has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.coordcheck.workload import Factory, WidthWorkload
from distmon.errors import ConfigError

OUTPUT = "(output)"
"""The output of the whole model: the logits."""


@dataclass(frozen=True)
class Sizes:
    """Root mean squares of one module's output at one width and seed, by step."""

    module: str
    width: int
    seed: int
    size: tuple[float, ...]
    """Of the output, before the first step and after each."""
    moved: tuple[float, ...]
    """Of its difference from the output before the first step, on the same batch."""


def measure(
    factory: Factory,
    widths: Sequence[int],
    seeds: int,
    steps: int,
    advance: Callable[[str], None] = lambda _: None,
) -> list[Sizes]:
    """Return the sizes of all modules at all widths, in layer order."""
    found: list[Sizes] = []
    for width in widths:
        for seed in range(seeds):
            advance(f"width {width}, seed {seed}")
            torch.manual_seed(seed)
            found += _measure_one(factory(width), width, seed, steps)
    names = [[each.module for each in found if each.width == width] for width in widths]
    if any(other != names[0] for other in names):
        raise ConfigError("the model has different modules at different widths")
    return found


def _measure_one(workload: WidthWorkload, width: int, seed: int, steps: int) -> list[Sizes]:
    probe = workload.batch(0)
    first = _outputs(workload.model, probe)
    sizes = {name: [_rms(value)] for name, value in first.items()}
    moved = {name: [0.0] for name in first}
    for step in range(1, steps + 1):
        batch = workload.batch(step)
        workload.optimizer.zero_grad()
        workload.loss(_call(workload.model, batch), batch).backward()  # type: ignore[no-untyped-call]
        workload.optimizer.step()
        for name, value in _outputs(workload.model, probe).items():
            sizes[name].append(_rms(value))
            moved[name].append(_rms(value - first[name]))
    return [Sizes(n, width, seed, tuple(sizes[n]), tuple(moved[n])) for n in first]


def _call(model: nn.Module, batch: Any) -> Any:
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of all modules that have parameters, and of the model."""
    found: dict[str, torch.Tensor] = {}
    with _hooked(model, found):
        output = _call(model, batch)
    if isinstance(output, torch.Tensor) and output.dim() > 0:
        found[OUTPUT] = output.float().clone()
    return found


@contextmanager
def _hooked(model: nn.Module, found: dict[str, torch.Tensor]) -> Iterator[None]:
    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                found[name] = output.detach().float().clone()

        return keep

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())
