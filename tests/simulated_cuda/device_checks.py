"""What the simulated device does, and which mistakes it shows."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

from simulated_cuda import device
from simulated_cuda.device import launches, peek, set_order, take_waits

CUDA = torch.device("cuda", 0)


def train(where: str, seed: int = 0) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and final weights of a small model."""
    set_order(seed)
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    model = nn.Sequential(*layers).to(where)
    inputs, labels = torch.randn(64, 16).to(where), torch.randint(0, 4, (64,)).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), [p.detach().cpu() for p in model.parameters()]


def check_training_is_bit_equal_to_the_cpu_in_every_order() -> None:
    losses, weights = train("cpu")
    for where, seed in (("cuda", 0), ("cuda", 1), ("cuda:1", 2), ("cuda", 3)):
        found, trained = train(where, seed)
        assert found == losses
        assert all(map(torch.equal, trained, weights))


def check_nothing_runs_before_the_host_waits() -> None:
    x = torch.ones(3, device=CUDA) + 1
    event = torch.Event(CUDA)
    event.record()
    assert not any(event.query() for _ in range(3))
    assert peek(x).tolist() != [2, 2, 2]
    event.synchronize()
    assert event.query()
    assert peek(x).tolist() == [2, 2, 2]
    assert take_waits() == ["event"]


def check_streams_advance_in_a_seeded_order() -> None:
    def finished(seed: int) -> list[bool]:
        set_order(seed)
        streams = [torch.Stream(CUDA) for _ in range(4)]
        events = []
        for stream in streams:
            with stream:
                torch.ones(3, device=CUDA)
                events.append(stream.record_event())
        return [event.query() for event in events]

    orders = {seed: finished(seed) for seed in range(1, 7)}
    assert orders == {seed: finished(seed) for seed in range(1, 7)}
    assert len({*map(tuple, orders.values())}) > 1


def check_a_missing_wait_between_streams_is_seen() -> None:
    side = torch.Stream(CUDA)
    for waits in (False, True):
        x = torch.full((4,), 7.0, device=CUDA)
        if waits:
            side.wait_stream(torch.accelerator.current_stream(CUDA))
        with side:
            y = x + 1
        side.synchronize()
        assert (peek(y).tolist() == [8.0] * 4) is waits
        device.extension.drain()


def check_freed_memory_is_handed_out_at_once_unless_a_stream_is_recorded() -> None:
    side = torch.Stream(CUDA)

    def read_after_free(records: bool) -> float:
        x = torch.full((1000,), 7.0, device=CUDA)
        side.wait_stream(torch.accelerator.current_stream(CUDA))
        with side:
            y = x + 1
        if records:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        z = torch.full((1000,), 100.0, device=CUDA)
        assert (z.data_ptr() == address) is not records
        torch.accelerator.current_stream(CUDA).synchronize()
        side.synchronize()
        return peek(y)[0].item()

    assert read_after_free(records=False) != 8.0
    assert read_after_free(records=True) == 8.0


def check_pinned_memory_is_poisoned_until_its_copy_has_run() -> None:
    x = torch.ones(3, device=CUDA)
    host = torch.zeros(3, pin_memory=True)
    assert host.is_pinned()
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    assert not take_waits()
    torch.accelerator.synchronize(CUDA)
    assert host.tolist() == [1, 1, 1]


def check_a_pinned_buffer_that_is_written_early_changes_what_arrives() -> None:
    host = torch.ones(3, pin_memory=True)
    x = host.to(CUDA, non_blocking=True)
    host.fill_(5)
    assert x.tolist() == [5, 5, 5]


def check_a_copy_of_the_other_device_waits_for_both_streams() -> None:
    set_order(4)
    x = torch.arange(4.0, device="cuda:1") * 2
    assert x.to("cuda:0").tolist() == [0, 2, 4, 6]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, device="cuda:0")


def check_waits_are_counted_by_kind() -> None:
    x = torch.ones(3, device=CUDA)
    take_waits()
    for act, kind in (
        (x.cpu, "blocking copy to host"),
        (x.sum().item, "_local_scalar_dense"),
        (lambda: torch.ones(3).to(CUDA), "blocking copy from host"),
        (lambda: torch.ones(3).to(CUDA, non_blocking=True), "copy from pageable memory"),
        (x.nonzero, "aten::nonzero"),
        (lambda: x[torch.tensor([0])], "index from host"),
        (torch.accelerator.synchronize, "device"),
        (torch.accelerator.current_stream(CUDA).synchronize, "stream"),
    ):
        act()
        assert kind in (found := take_waits()), found
        assert len(found) <= 2, found


def check_waits_of_other_threads_are_told_apart() -> None:
    x = torch.ones(3, device=CUDA)
    thread = threading.Thread(target=x.cpu)
    thread.start()
    thread.join()
    assert not take_waits()


def check_capture_refuses_what_cuda_refuses_and_replay_runs_it() -> None:
    x = torch.zeros(3, device=CUDA)
    event = torch.Event(CUDA)
    event.record()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        x.add_(1)
    for _ in range(2):
        graph.replay()
    assert x.tolist() == [2, 2, 2]
    calls: tuple[Any, ...] = (event.query, event.synchronize, torch.ones(3).pin_memory, x.cpu)
    for call in calls:
        broken = torch.cuda.CUDAGraph()
        broken.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted"):
            call()
        with pytest.raises(RuntimeError, match="previous error in capture"):
            broken.capture_end()


def check_an_event_of_a_graph_cannot_be_read() -> None:
    event = torch.Event(CUDA, enable_timing=True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.record()
    with pytest.raises(RuntimeError, match="captured"):
        event.query()


def check_device_time_counts_jobs() -> None:
    begin, end = (torch.Event(CUDA, enable_timing=True) for _ in range(2))
    x = torch.zeros(3, device=CUDA)
    begin.record()
    for _ in range(100):
        x.add_(1)
    end.record()
    torch.accelerator.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1.0)


def check_memory_statistics() -> None:
    before = torch.accelerator.memory_allocated(1)
    x = torch.zeros(1000, device="cuda:1")
    assert torch.accelerator.memory_allocated(1) - before == 4096
    del x
    assert torch.accelerator.memory_allocated(1) == before
    assert torch.accelerator.max_memory_allocated(1) >= before + 4096


def check_generators_are_seeded_and_leave_the_host_alone() -> None:
    def draw() -> list[Any]:
        torch.manual_seed(3)
        x = torch.randn(5, device=CUDA)
        y = nn.functional.dropout(torch.ones(50, device=CUDA))
        host = torch.rand(3)
        return [x.tolist(), y.tolist(), host.tolist()]

    first = draw()
    assert draw() == first
    torch.manual_seed(3)
    assert torch.rand(3).tolist() == first[2]


def check_copies_and_files() -> None:
    model = nn.Linear(3, 3).to("cuda:1")
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight.cpu(), model.weight.cpu())
    assert twin.weight.device.index == 1
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["weight"].device.index == 1
    assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())


def check_launches_are_listed() -> None:
    with launches() as names:
        torch.ones(3, device=CUDA).add_(1)
    assert names == ["aten::fill_.Scalar", "aten::add.out"]


def check_threads_share_the_device() -> None:
    def work() -> None:
        for _ in range(50):
            assert (torch.ones(50, device=CUDA) * 2).sum().item() == 100

    set_order(5)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
