"""The user's own model: a factory, one step of it, and what can be wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.bench.measuring import default_device
from distmon.bench.training import DTYPES, Dtype, Training, Workload
from distmon.errors import ConfigError
from distmon.verify.workloads import find_factory

Step = Callable[[nn.Module], torch.Tensor]
"""A forward pass on a batch of its own; returns the loss."""


@dataclass(frozen=True)
class Batch:
    """A random batch for a model that comes without data: noise, or integers below `below`."""

    shape: tuple[int, ...]
    below: int | None

    @classmethod
    def parse(cls, text: str) -> Batch:
        """Parse `8x128` as noise, `8x128:50257` as integers below 50257."""
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*(:[1-9]\d*)?", text):
            raise ConfigError(
                '--batch must be a shape such as "8x128", or "8x128:50257" for integers below '
                f'50257, not "{text}"'
            )
        shape, _, below = text.partition(":")
        return cls(tuple(int(n) for n in shape.split("x")), int(below) if below else None)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the mean square of the output, or the output itself when it is one number."""
        weight = next(model.parameters())
        if self.below is None:
            batch = torch.randn(self.shape, device=weight.device, dtype=weight.dtype)
        else:
            batch = torch.randint(self.below, self.shape, device=weight.device)
        output = model(batch)
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        output = getattr(output, "logits", output)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"the model returns a {type(output).__name__}, not a tensor")
        return output if output.ndim == 0 else output.float().square().mean()


class UserModel:
    """`module:factory` of a user. Picklable: another process calls the factory again."""

    def __init__(self, source: str, batch: Batch | None) -> None:
        self.source = source
        self._batch = batch
        self._step: Step | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None}

    def build(self) -> nn.Module:
        """Call the factory; a mistake is a `ConfigError`."""
        source = self.source
        made = self._call_factory()
        model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module) or not (step is None or callable(step)):
            raise ConfigError(f"{source}() must return a model, or (model, step)")
        if step is None and self._batch is None:
            raise ConfigError(
                f'{source}() returns a model alone: pass --batch, such as "8x128", or return '
                "(model, step) where step(model) is the loss"
            )
        if step is not None and self._batch is not None:
            raise ConfigError(f"{source}() returns a step with the model: --batch is not used")
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"the model of {source}() has no parameter that learns")
        self._step = step
        return model

    def _call_factory(self) -> Any:
        try:
            factory = find_factory(self.source)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's module does
            module = self.source.partition(":")[0]
            text = _first_line(error)
            raise ConfigError(f'cannot import "{module}" of --model: {text}') from error
        try:
            return factory()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self.source}() raises {_first_line(error)}") from error

    def loss(self, model: nn.Module, _: torch.device) -> torch.Tensor:
        """Return the loss of the model that `build` made last."""
        if self._step is not None:
            return self._step(model)
        assert self._batch is not None  # `build` has checked it
        return self._batch.loss(model)


def user_workload(source: str, batch: str | None) -> tuple[Workload, Dtype]:
    """Build the model and train one step of it, so that its mistakes are found here.

    A `ConfigError` in one sentence for each of them.
    """
    users = UserModel(source, None if batch is None else Batch.parse(batch))
    conditions = source if batch is None else f"{source}, batch {batch}"
    workload = Workload(source, conditions, users.build, users.loss)
    dtype = _dtype_of(users)
    device = default_device()
    try:
        training = Training.begin(workload, dtype, device)
        loss = users.loss(training.model, device)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                f"the step of {source}() must return the loss, a scalar with a gradient"
            )
        if not bool(torch.isfinite(loss.detach())):
            raise ConfigError(f"the loss of {source}() is {float(loss.detach())} in the first step")
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
    except ConfigError:
        raise
    except Exception as error:
        text = _first_line(error)
        raise ConfigError(f"a training step of {source}() raises {text}") from error
    return workload, dtype


def _dtype_of(users: UserModel) -> Dtype:
    torch.manual_seed(0)
    found = {p.dtype for p in users.build().parameters()}
    for name, dtype in DTYPES.items():
        if found == {dtype}:
            return name
    listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    raise ConfigError(
        f"the parameters of {users.source}() must be all float32 or all bfloat16, not {listed}"
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of an error: torch adds tracebacks of its own."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
