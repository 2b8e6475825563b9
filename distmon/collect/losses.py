"""The loss of every step, kept on its device until the next observation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.device import DeviceMark, is_accelerator, pinned
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
        self._kept: deque[tuple[int, bool, Arriving | float]] = deque(maxlen=capacity)
        """Step, whether it has a loss, and the loss where that is kept on the host."""
        self._newest = -1
        self._device_values: torch.Tensor | None = None
        if not (device.type == "cpu" if on_host is None else on_host):
            self._device_values = torch.zeros(capacity, dtype=torch.float64, device=device)
        self._added = 0

    def add(self, step: int, loss: float | torch.Tensor | None) -> None:
        """Append the loss of one step, or its absence. One that cannot be read raises."""
        if type(loss) is float and self._device_values is None:  # as mostly on a CPU
            self._append(step, True, loss)
            return
        if loss is not None:
            loss = local_loss(loss)
        number: Arriving | float = 0.0
        if self._device_values is None:
            number = Arriving(0.0 if loss is None else loss)
        elif loss is not None:
            cell = self._device_values[self._added % self.capacity]
            if isinstance(loss, torch.Tensor) and not loss.is_cpu:
                cell.copy_(loss.detach().reshape(()), non_blocking=True)
            else:
                cell.fill_(host_value(loss))
        self._append(step, loss is not None, number)

    def _append(self, step: int, given: bool, number: Arriving | float) -> None:
        self._kept.append((step, given, number))
        self._newest = step
        self._added += 1

    def extend(self, steps: Sequence[int], losses: Sequence[float | None]) -> None:
        """Append the losses of several steps, which are on the host."""
        if self._device_values is not None or not steps:
            for step, loss in zip(steps, losses, strict=True):
                self.add(step, loss)
            return
        for step, loss in zip(steps, losses, strict=True):
            self._kept.append((step, loss is not None, 0.0 if loss is None else loss))
        self._newest = steps[-1]
        self._added += len(steps)

    @property
    def newest_step(self) -> int:
        """The step that was added last; -1 before the first."""
        return self._newest

    def complete(self, step: int) -> None:
        """Append the absence of a loss unless `step` was added: ranks add losses by position."""
        if self._newest != step:
            self.add(step, None)

    def __len__(self) -> int:
        """Return how many steps have a loss."""
        return sum(given for _, given, _ in self._kept)

    def take(self) -> tuple[list[int], torch.Tensor | Floats, Floats]:
        """Return steps, values on their device, and 1 where a loss was given; clear the ring."""
        values = self._values()
        steps, given, _ = zip(*self._kept, strict=True) if self._kept else ((), (), ())
        self._clear()
        return [*steps], values, np.array(given, dtype=np.float64)

    def to_list(self) -> list[tuple[int, float | None]]:
        """Return steps and losses, None for a step without one. Waits for the device.

        All steps: ranks add losses by position, and one of them may have none.
        """
        if not len(self):
            return [(step, None) for step, _, _ in self._kept]
        rows = zip(self._kept, self._values().tolist(), strict=True)
        return [(step, value if given else None) for (step, given, _), value in rows]

    def restore(self, losses: Sequence[tuple[int, float | None]]) -> None:
        """Restore what `to_list` returned."""
        self._clear()
        self._newest = -1
        for step, loss in losses:
            self.add(step, loss)

    def mark(self) -> Callable[[], bool]:
        """Return a function that returns whether a device has computed all losses by now."""
        if self._device_values is not None and is_accelerator(self._device_values.device):
            return DeviceMark(self._device_values.device).done
        numbers = [number for _, _, number in self._kept]
        return lambda: all(isinstance(x, float) or x.there() for x in numbers)

    def drop_absent(self) -> int:
        """Forget the losses that are still on a device; their steps stay. Return how many."""
        before = len(self)
        on_device = self._device_values is not None
        for i, (step, _, number) in enumerate(self._kept):
            if on_device or not (isinstance(number, float) or number.there()):
                self._kept[i] = (step, False, 0.0)
        return before - len(self)

    def _values(self) -> torch.Tensor | Floats:
        """Return the values in the order of the steps."""
        if self._device_values is None:
            values = [x if isinstance(x, float) else x.read() for _, _, x in self._kept]
            return np.array(values, dtype=np.float64)
        oldest = self._added % self.capacity if self._added > self.capacity else 0
        return self._device_values.roll(-oldest)[: len(self._kept)]

    def _clear(self) -> None:
        self._kept.clear()
        self._added = 0


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


def one_number(value: Any) -> Number:
    """Return a reported number that can be sent later; raise for what is none.

    A number on a device stays there.
    """
    number = local_loss(value)
    if isinstance(number, torch.Tensor) and not number.is_cpu:
        return number.detach().reshape(())
    return host_value(number)


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
        if type(value) is float:  # as mostly: no function is called
            self._host += value
        if value is None or type(value) is float:
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
