"""The loss of every step, kept on its device until the next observation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.device import DeviceMark, pinned
from distmon.layout.reported import local_loss

Number = float | torch.Tensor
Floats = NDArray[np.float64]


class LossRing:
    """This rank's newest losses since the last observation, with their steps.

    With weights on an accelerator the losses are kept in a small buffer there, so that no step
    waits for the device. With weights on the host a loss on a device is copied to the host, and
    read when it is sent. At most `capacity` are kept.
    """

    def __init__(self, capacity: int, device: torch.device, on_host: bool | None = None) -> None:
        """`on_host`: keep the losses on the host; the default for a CPU."""
        self.capacity = capacity
        self._steps: deque[int] = deque(maxlen=capacity)
        self._given: deque[bool] = deque(maxlen=capacity)
        self._host: deque[Arriving] = deque(maxlen=capacity)
        self._device_values: torch.Tensor | None = None
        if not (device.type == "cpu" if on_host is None else on_host):
            self._device_values = torch.zeros(capacity, dtype=torch.float64, device=device)
        self._added = 0

    def add(self, step: int, loss: float | torch.Tensor | None) -> None:
        """Append the loss of one step, or its absence. One that cannot be read is not appended."""
        if loss is not None:
            loss = local_loss(loss)
        if self._device_values is None:
            self._host.append(Arriving(0.0 if loss is None else loss))
        elif loss is not None:
            cell = self._device_values[self._added % self.capacity]
            if isinstance(loss, torch.Tensor) and not loss.is_cpu:
                cell.copy_(loss.detach().reshape(()), non_blocking=True)
            else:
                cell.fill_(host_value(loss))
        self._steps.append(step)
        self._given.append(loss is not None)
        self._added += 1

    def __len__(self) -> int:
        """Return how many steps have a loss."""
        return sum(self._given)

    def take(self) -> tuple[list[int], torch.Tensor | Floats, Floats]:
        """Return steps, values on their device, and 1 where a loss was given; clear the ring."""
        steps, values = [*self._steps], self._values()
        given = np.array(self._given, dtype=np.float64)
        self._clear()
        return steps, values, given

    def to_list(self) -> list[tuple[int, float]]:
        """Return steps and losses, for a checkpoint. Waits for the device."""
        rows = zip(self._steps, self._values().tolist(), self._given, strict=True)
        return [(step, value) for step, value, there in rows if there]

    def restore(self, losses: Sequence[tuple[int, float]]) -> None:
        """Restore what `to_list` returned."""
        self._clear()
        for step, loss in losses:
            self.add(step, loss)

    def _values(self) -> torch.Tensor | Floats:
        """Return the values in the order of the steps."""
        if self._device_values is None:
            return np.array([loss.read() for loss in self._host], dtype=np.float64)
        oldest = self._added % self.capacity if self._added > self.capacity else 0
        return self._device_values.roll(-oldest)[: len(self._steps)]

    def _clear(self) -> None:
        self._added = 0
        for kept in (self._steps, self._given, self._host):
            kept.clear()


def host_value(value: Any) -> float:
    """Return the value of a Python number or of a CPU tensor of one element.

    Uses `tolist`: with cold caches it costs less than `item`, and a third of going through numpy.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    number: Any = value.tolist()
    while isinstance(number, list):
        (number,) = number
    return float(number)


def on_host(value: float | torch.Tensor) -> bool:
    """Return whether `host_value` reads it without waiting for a device."""
    return not isinstance(value, torch.Tensor) or value.is_cpu


class Arriving:
    """A number that is copied to the host without waiting for the device."""

    def __init__(self, value: Number) -> None:
        self._mark: DeviceMark | None = None
        value = local_loss(value)
        if on_host(value):
            self._value: Number = host_value(value)
        elif isinstance(value, torch.Tensor):
            self._value = pinned((), torch.float32)
            self._value.copy_(value.detach().reshape(()), non_blocking=True)
            self._mark = DeviceMark(value.device)

    def there(self) -> bool:
        """Return whether the copy is done."""
        return self._mark is None or self._mark.done()

    def read(self) -> float:
        """Return the number; waits for the copy."""
        if self._mark is not None:
            self._mark.wait()
        return host_value(self._value)


class NumberSum:
    """Adds up numbers where they are: on the host, or on a device without waiting for it."""

    def __init__(self) -> None:
        self._host = 0.0
        self._device: torch.Tensor | None = None

    def add(self, value: Number | None) -> None:
        """Add a number, or nothing."""
        if value is None:
            return
        value = local_loss(value)
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            number = value.detach().reshape(())
            self._device = number.clone() if self._device is None else self._device + number
        else:
            self._host += host_value(value)

    def take(self) -> Number:
        """Return the sum since the last call, on a device if a part of it is there."""
        host, device = self._host, self._device
        self._host, self._device = 0.0, None
        if device is None:
            return host
        return device + host if host else device


def split_by_place(
    values: Mapping[str, Number],
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the numbers on the host, and those on a device."""
    host: dict[str, float] = {}
    device: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            device[name] = value
        else:
            host[name] = host_value(value)
    return host, device
