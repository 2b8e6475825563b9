"""Paths of the accelerator code that a healthy training rarely takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distmon.collect.gradient_gain.backward_norms import _gathered
from distmon.collect.losses import LossRing, NumberSum
from distmon.collect.signals.host_numbers import HostNumbers
from distmon.collect.telemetry.mfu.measured_peak import measure_peak
from distmon.errors import CollectiveError
from distmon.reduce.buffers import Buffers, BufferSizes, HostPool
from distmon.reduce.channel import Channel
from distmon.reduce.outbox import DeviceOutbox, HostOutbox, Shipment
from simulated_cuda.device import take_waits

CUDA = torch.device("cuda", 1)
SIZES = BufferSizes(parameters=2, losses=3)


def shipment(number: int) -> Shipment[None]:
    return Shipment(number, 10 * number, 7, None)


def filled(loss: float) -> Buffers:
    """Buffers on the device with one loss, which is there only when its job has run."""
    buffers = Buffers(SIZES, 0, CUDA)
    buffers.clear()
    values = torch.full((1,), loss, dtype=torch.float64, device=CUDA)
    buffers.put_losses(values, np.ones(1))
    number = torch.full((), 3.0, device=CUDA)
    buffers.put_slot({"step": 10.0, "tokens": number}, [5] * 0, "text")
    return buffers


def losses_of(outbox: HostOutbox[None]) -> dict[int, float]:
    """The losses of the oldest observation, once the device has copied it."""
    torch.accelerator.synchronize(CUDA)
    first = outbox.first_arrived()
    assert first is not None
    assert first.buffers is not None
    outbox.remove_first()
    return first.buffers.view.read_losses([first.step])


def check_both_outboxes_carry_what_the_device_computes() -> None:
    for kind in (HostOutbox, DeviceOutbox):
        outbox: HostOutbox[None] = kind(Channel(), HostPool(SIZES, 0, pinned=True))
        outbox.post(shipment(1), filled(4.0))
        assert outbox.first_arrived() is None
        assert outbox.waits_for_device
        torch.accelerator.synchronize(CUDA)
        first = outbox.first_arrived()
        assert first is not None
        assert first.buffers is not None
        fields, errors = first.buffers.view.read_slots()
        assert fields["tokens"].tolist() == [3.0]
        assert errors == {0: "text"}
        assert losses_of(outbox) == {10: 4.0}
        assert not outbox.waits_for_device


def check_without_memory_the_host_sends_nothing_and_the_device_everything() -> None:
    for kind, expected in ((HostOutbox, {}), (DeviceOutbox, {20: 5.0})):
        pool = HostPool(SIZES, 0, pinned=True)
        pool._most = 1
        outbox: HostOutbox[None] = kind(Channel(), pool)
        outbox.post(shipment(1), filled(4.0))
        outbox.post(shipment(2), filled(5.0))
        torch.accelerator.synchronize(CUDA)
        first = outbox.first_arrived()
        assert first is not None
        assert first.buffers is not None
        assert first.buffers.view.read_losses([10]) == {10: 4.0}
        outbox.remove_first()
        pool.give(first.buffers)
        assert losses_of(outbox) == expected, kind
        assert outbox.abandon() == []


def check_a_failure_of_the_device_transport_is_one_of_its_collectives() -> None:
    class Broken(Channel):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self._error = error

        def launch(self, *_: Any) -> Any:
            raise self._error

    for error, text in ((CollectiveError("gone"), "gone"), (MemoryError("no"), "MemoryError: no")):
        outbox = DeviceOutbox[None](Broken(error), HostPool(SIZES, 0, pinned=True))
        with pytest.raises(CollectiveError, match=text):
            outbox.post(shipment(1), filled(4.0))


def check_losses_that_a_device_never_computes_are_dropped() -> None:
    ring = LossRing(4, CUDA)
    ring.add(1, torch.ones((), device=CUDA))
    ring.add(2, None)
    reached = ring.mark()
    assert not reached()
    assert ring.drop_absent() == 1
    torch.accelerator.synchronize(CUDA)
    assert reached()
    assert ring.to_list() == [(1, None), (2, None)]
    on_host = LossRing(4, CUDA, on_host=True)
    on_host.add(1, torch.ones((), device=CUDA))
    assert on_host.drop_absent() == 1


def check_numbers_of_the_device_are_added_up_there() -> None:
    total = NumberSum()
    total.add(torch.full((), 2.0, device=CUDA))
    total.add(torch.full((), 3.0, device=CUDA))
    total.add(4.0)
    total.add(None)
    taken = total.take()
    assert isinstance(taken, torch.Tensor)
    assert float(taken) == 9.0
    assert total.take() == 0.0


def check_numbers_arrive_with_the_next_exchange() -> None:
    numbers = HostNumbers()
    assert numbers.exchange(torch.full((2,), 1.0, device=CUDA)) is None
    assert numbers.exchange(torch.full((2,), 2.0, device=CUDA)) is None  # not copied yet
    torch.accelerator.synchronize(CUDA)
    assert numbers.exchange(torch.full((2,), 3.0, device=CUDA)) == [2.0, 2.0]


def check_rows_of_blocks_on_two_devices_are_gathered_on_one() -> None:
    rows = [torch.full((2,), 1.0 + i, device=f"cuda:{i}", dtype=torch.float64) for i in range(2)]
    assert _gathered(rows, CUDA).tolist() == [[1.0, 1.0], [2.0, 2.0]]


def check_the_peak_is_measured_until_the_device_is_done() -> None:
    take_waits()
    peak = measure_peak(CUDA, "fp32", size=8, seconds=0.0)
    assert peak.flops > 0
    assert len(take_waits()) >= 2  # one for every product
