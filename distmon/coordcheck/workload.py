"""What is trained at each width: made by a factory of the user's, or built in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.errors import ConfigError
from distmon.verify.workloads import find_factory, scalar_or_mean_square


@dataclass(frozen=True)
class WidthWorkload:
    """A model of one width with its data, loss and optimizer."""

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer


Factory = Callable[[int], WidthWorkload]
_RETURNS = "(model, batch), (model, batch, loss) or (model, batch, loss, optimizer)"


def load_factory(source: str, built_in: dict[str, Factory], lr: float) -> Factory:
    """Return the factory that `--model` names; raise ConfigError when there is none."""
    if source in built_in:
        return built_in[source]
    if ":" not in source:
        known = ", ".join(built_in)
        raise ConfigError(f'--model must be "module:factory" or one of {known}, not "{source}"')
    function: Any = find_factory(source)
    return lambda width: _made(source, function, width, lr)


def _made(source: str, function: Callable[[int], Any], width: int, lr: float) -> WidthWorkload:
    try:
        made = function(width)
    except Exception as error:
        raise ConfigError(f"{source}({width}) raises {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        raise ConfigError(f"{source}(width) must return {_RETURNS}")
    model, batch, *rest = made
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model of {source}() is a {type(model).__name__}, not a Module")
    loss: Any = rest[0] if rest else scalar_or_mean_square
    if not callable(batch) or not callable(loss):
        raise ConfigError(f"the batch and loss of {source}() must be functions")
    optimizer = rest[1] if len(rest) > 1 else torch.optim.Adam(model.parameters(), lr=lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer of {source}() is a {type(optimizer).__name__}")
    return WidthWorkload(model, batch, loss, optimizer)


def parse_widths(text: str) -> list[int]:
    """Return the widths of `--widths`; raise ConfigError for fewer than three."""
    try:
        widths: Sequence[int] = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ConfigError(
            f'--widths must be whole numbers such as 128,256,512, not "{text}"'
        ) from None
    if len(widths) < 3 or widths[0] < 1:
        raise ConfigError("--widths must name at least 3 different widths above 0")
    return [*widths]
