"""Load the model to verify: the built-in one, or a user's `module:factory`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distmon.errors import ConfigError
from distmon.verify.parallelisms import Workload
from distmon.verify.parallelisms.example_model import example_workload

SEED = 0


def load_workload(source: str | None) -> Workload:
    """Return a new model, its data and its loss, equal in every process and at every call.

    `source` is `module:factory`, or None for the built-in model. `factory()` returns
    `(model, batch)` or `(model, batch, loss)`. Raises ConfigError for anything else.
    """
    torch.manual_seed(SEED)
    if source is None:
        return example_workload()
    factory = find_factory(source)
    try:
        made = factory()
    except Exception as error:
        raise ConfigError(f"{source}() raises {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(f"{source}() must return (model, batch) or (model, batch, loss)")
    model, batch, *rest = made
    loss = rest[0] if rest else scalar_or_mean_square
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model of {source}() is a {type(model).__name__}, not a Module")
    if not callable(batch) or not callable(loss):
        raise ConfigError(f"the batch and loss of {source}() must be functions")
    return Workload(model.double(), lambda step: _in_double(batch(step)), loss)


def check_rows(workload: Workload, ranks: int) -> None:
    """Raise ConfigError unless every rank gets the same number of rows, as a mean loss needs."""
    try:
        batch = workload.batch(1)
    except Exception as error:
        raise ConfigError(f"batch(1) raises {type(error).__name__}: {error}") from error
    if not isinstance(batch, torch.Tensor) or batch.ndim == 0:
        raise ConfigError("batch(step) must return a tensor whose rows are examples")
    if len(batch) % ranks:
        raise ConfigError(
            f"the global batch has {len(batch)} rows, which {ranks} ranks cannot share equally"
        )


def scalar_or_mean_square(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the output if it is a scalar, else its mean square: the default loss."""
    return output if output.ndim == 0 else output.square().mean()


def find_factory(source: str) -> Callable[[], Any]:
    """Return the function that `module:factory` names; raise ConfigError when there is none."""
    name, colon, attribute = source.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(f'--model must be "module:factory", not "{source}"')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'cannot import "{name}" of --model: {error}') from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f'"{name}" has no function "{attribute}"')
    made: Callable[[], Any] = factory
    return made


def _in_double(batch: torch.Tensor) -> torch.Tensor:
    floating = isinstance(batch, torch.Tensor) and batch.is_floating_point()
    return batch.double() if floating else batch
