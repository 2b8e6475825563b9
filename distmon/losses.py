"""The loss of every step: kept on the device until an observation, then averaged into an EMA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distmon.device_marks import DeviceMark, to_device

Number = float | torch.Tensor


class LossEma:
    """`ema = decay * ema + (1 - decay) * loss`, started from the first loss.

    The weight on the new loss is the small one: decay 0.99 remembers about 100 steps. A loss that
    is not finite is left out, since it would stay in the average for good.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value: float | None = None

    def update(self, loss: float) -> float | None:
        """Take in one loss and return the average."""
        if math.isfinite(loss):
            old = self.value
            self.value = loss if old is None else self.decay * old + (1 - self.decay) * loss
        return self.value


class LossRing:
    """This rank's losses since the last observation, with their steps.

    A loss on the CPU is read where it lies; one on an accelerator is copied into a small buffer
    there, so that no step waits for the device. At most `capacity` are kept.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._values = torch.zeros(capacity, dtype=torch.float64, device=device)
        self._given = torch.zeros(capacity, dtype=torch.float64)
        self._on_host = device.type == "cpu"
        self._host_values = self._values.numpy() if self._on_host else None
        self._host_given = self._given.numpy()
        self._steps: list[int] = []

    def add(self, step: int, loss: float | torch.Tensor | None) -> None:
        """Append the loss of one step, or its absence. When full, the newest is overwritten."""
        i = min(len(self._steps), self.capacity - 1)
        self._steps[i:] = [step]
        self._host_given[i] = loss is not None
        if loss is None:
            return
        if self._host_values is not None:
            self._host_values[i] = host_value(loss)
        elif isinstance(loss, torch.Tensor):
            self._values[i].copy_(loss.detach().reshape(()), non_blocking=True)
        else:
            self._values[i] = loss

    def take(self) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Steps, values, and whether they were given; the ring starts anew."""
        steps, self._steps = self._steps, []
        given = to_device(self._given[: len(steps)], self._values.device)
        return steps, self._values[: len(steps)], given

    def to_list(self) -> list[tuple[int, float]]:
        """What is in the ring, for a checkpoint. Waits for the device."""
        values = self._values[: len(self._steps)].tolist()
        given = self._host_given[: len(self._steps)]
        rows = zip(self._steps, values, given, strict=True)
        return [(step, value) for step, value, there in rows if there]

    def restore(self, losses: Sequence[tuple[int, float]]) -> None:
        """Put back what `to_list` gave."""
        self._steps = []
        for step, loss in losses:
            self.add(step, loss)


def host_value(value: Any) -> float:
    """A number that is already on the host: a Python number or a CPU tensor of one element.

    Read through numpy, not torch's `.item()`: there is no device to wait for.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    try:
        return float(value.detach().numpy().item())
    except TypeError:  # numpy has no bfloat16
        return float(value.detach().float().numpy().item())


def on_host(value: float | torch.Tensor) -> bool:
    """Whether `host_value` may be asked without waiting for a device."""
    return not isinstance(value, torch.Tensor) or value.is_cpu


class Arriving:
    """A number on its way to the host; one on an accelerator is copied without waiting for it."""

    def __init__(self, value: Number) -> None:
        self._mark: DeviceMark | None = None
        if on_host(value):
            self._value: Number = host_value(value)
        elif isinstance(value, torch.Tensor):
            self._value = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._value.copy_(value.detach().reshape(()), non_blocking=True)
            self._mark = DeviceMark()

    def there(self) -> bool:
        """Whether `read` would not wait."""
        return self._mark is None or self._mark.done()

    def read(self) -> float:
        """The number, as soon as it is there."""
        if self._mark is not None:
            self._mark.wait()
        return host_value(self._value)
