"""The loss of every step: kept on the device until an observation, then averaged into an EMA."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.device_marks import DeviceMark

Number = float | torch.Tensor
Floats = NDArray[np.float64]


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
    """This rank's newest losses since the last observation, with their steps.

    A loss on the CPU is read where it lies; one on an accelerator is copied into a small buffer
    there, so that no step waits for the device. At most `capacity` are kept.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._steps: deque[int] = deque(maxlen=capacity)
        self._given: deque[bool] = deque(maxlen=capacity)
        self._host: deque[float] = deque(maxlen=capacity)
        self._device_values: torch.Tensor | None = None
        if device.type != "cpu":
            self._device_values = torch.zeros(capacity, dtype=torch.float64, device=device)
        self._added = 0

    def add(self, step: int, loss: float | torch.Tensor | None) -> None:
        """Append the loss of one step, or its absence."""
        self._steps.append(step)
        self._given.append(loss is not None)
        if self._device_values is None:
            self._host.append(0.0 if loss is None else host_value(loss))
        elif loss is not None:
            place = self._device_values[self._added % self.capacity]
            if isinstance(loss, torch.Tensor):
                place.copy_(loss.detach().reshape(()), non_blocking=True)
            else:
                place.fill_(loss)
        self._added += 1

    def take(self) -> tuple[list[int], torch.Tensor | Floats, Floats]:
        """Steps, values where losses are, and 1 where there is one; the ring starts anew."""
        steps, values = [*self._steps], self._values()
        given = np.array(self._given, dtype=np.float64)
        self._clear()
        return steps, values, given

    def to_list(self) -> list[tuple[int, float]]:
        """What is in the ring, for a checkpoint. Waits for the device."""
        rows = zip(self._steps, self._values().tolist(), self._given, strict=True)
        return [(step, value) for step, value, there in rows if there]

    def restore(self, losses: Sequence[tuple[int, float]]) -> None:
        """Put back what `to_list` gave."""
        self._clear()
        for step, loss in losses:
            self.add(step, loss)

    def _values(self) -> torch.Tensor | Floats:
        """In the order of the steps."""
        if self._device_values is None:
            return np.array(self._host, dtype=np.float64)
        oldest = self._added % self.capacity if self._added > self.capacity else 0
        return self._device_values.roll(-oldest)[: len(self._steps)]

    def _clear(self) -> None:
        self._added = 0
        for kept in (self._steps, self._given, self._host):
            kept.clear()


def host_value(value: Any) -> float:
    """A number that is already on the host: a Python number or a CPU tensor of one element.

    By `tolist`: on cold caches it costs less than `item`, and a third of the way through numpy.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    number: Any = value.tolist()
    while isinstance(number, list):
        (number,) = number
    return float(number)


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
