"""Nothing waits without a limit: rules, callbacks, sinks, stores, forks, delayed ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model, train

import distmon
from distmon import read_run
from distmon.reduce.progress import Progress
from distmon.runs.run_folder import RunFolder

FOREVER = threading.Event()
GENEROUS_S = 45.0
"""Above every limit of the monitor together, and below any timeout of a collective."""


def _runnable_s() -> float:
    """Seconds that this thread was on a processor or in the queue for one, as on a busy machine.

    What else passes on the clock is time in which it waits for something.
    """
    on_processor, in_queue = map(int, Path("/proc/thread-self/schedstat").read_text().split()[:2])
    return 1e-9 * (on_processor + in_queue)


@distmon.rule()
def never_returns(*_: Any) -> list[Any]:
    """A rule that hangs."""
    FOREVER.wait()
    return []


@distmon.rule()
def leaves(*_: Any) -> list[Any]:
    """A rule that tries to end the process."""
    raise SystemExit(3)


def _observe(folder: Path, **options: Any) -> list[Any]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(folder), **options) as monitor:
        return train(model, optimizer, monitor, range(1, 6))


def test_a_rule_that_never_returns_is_disabled_and_named(tmp_path: Path, caplog: Any) -> None:
    begin = time.monotonic()
    records = _observe(tmp_path, own_rules=[never_returns], callback_timeout_s=0.2)
    assert len(records) == 5
    assert time.monotonic() - begin < GENEROUS_S
    assert "rule never_returns failed on rank 0" in caplog.text
    assert "did not return within 0.2 s" in caplog.text


def test_a_callback_that_never_returns_is_disabled_and_named(tmp_path: Path, caplog: Any) -> None:
    options = {"on_alert": lambda _: FOREVER.wait(), "callback_timeout_s": 0.2}
    rules = {"always": {"when": "update_ratio_max > 0"}}
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, rules=rules), **options) as monitor:
        assert len(train(model, optimizer, monitor, range(1, 4))) == 3
    assert "on_alert failed on rank 0" in caplog.text


def test_a_rule_cannot_end_the_process(tmp_path: Path, caplog: Any) -> None:
    assert len(_observe(tmp_path, own_rules=[leaves])) == 5
    assert "rule leaves failed on rank 0 (DistmonError: raised SystemExit)" in caplog.text


def test_a_callback_cannot_end_the_process(tmp_path: Path, caplog: Any) -> None:
    def leave(_: distmon.Alert) -> None:
        raise SystemExit(4)

    rules = {"always": {"when": "update_ratio_max > 0"}}
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(
        model,
        optimizer,
        **quiet(tmp_path, rules=rules, actions={"checkpoint": "always"}),
        on_checkpoint=leave,
    )
    with monitor:
        assert len(train(model, optimizer, monitor, range(1, 5))) == 4
    assert "on_checkpoint failed on rank 0 (DistmonError: raised SystemExit(4))" in caplog.text


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Silent:
        def set(self, *_: Any) -> None:
            FOREVER.wait()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        progress = Progress("test", 0, 2)
        monkeypatch.setattr(progress, "_store", _Silent())
        progress.publish(3)
        assert progress.describe(3, lambda _: None).is_alive()
    finally:
        dist.destroy_process_group()


def test_a_forked_child_leaves_the_monitor_alone(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 3))
        child = os.fork()
        if child == 0:
            monitor.step(loss=1.0)
            monitor.close()
            os._exit(7 if monitor.closed and monitor.last_record is not None else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(train(model, optimizer, monitor, range(3, 5))) == 2


def _delayed(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Rank 1 comes 200 ms late to every observation."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    waits = []
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=2)) as monitor:
        for step in range(1, 9):
            optimizer.step()
            if rank == 1 and step % 2 == 0:
                time.sleep(0.2)
            begin = time.monotonic() - _runnable_s()
            monitor.step(loss=1.0)
            waits.append(time.monotonic() - _runnable_s() - begin)
            monitor.cycle.settle(5.0)  # the next observation has memory of its own
        steps = monitor.schedule.completed
    return {"waits": waits, "steps": steps}


def test_no_rank_waits_in_a_step_for_one_that_is_delayed(tmp_path: Path) -> None:
    first, _ = run_ranks(_delayed, 2, str(tmp_path), strict=False)
    # On a busy machine some steps wait for another thread of theirs; not for delays of 200 ms.
    assert sorted(first["waits"])[len(first["waits"]) // 2] < 0.1
    records = distmon.read_run(tmp_path / "run").records
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    assert all(max(record["ranks"]["monitor_wait_seconds"]) == 0 for record in records)


def _into_a_pipe_that_is_not_read(rank: int, _: int, folder: str) -> dict[str, Any]:
    """The sink writes to a pipe that is full after a few records; it never returns from then on."""
    run = Path(folder) / "run"
    if rank == 0:
        run.mkdir()
        os.mkfifo(run / "records.jsonl")
    dist.barrier()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(Path(folder), sinks=["jsonl"]))
    longest = 0.0
    for _ in range(60):
        begin = time.monotonic() - _runnable_s()
        optimizer.step()
        monitor.step(loss=1.0)
        longest = max(longest, time.monotonic() - _runnable_s() - begin)
    begin = time.monotonic()
    monitor.close()
    return {"longest": longest, "close": time.monotonic() - begin}


def test_a_sink_that_never_returns_holds_no_step_and_ten_seconds_of_close(tmp_path: Path) -> None:
    for found in run_ranks(_into_a_pipe_that_is_not_read, 2, str(tmp_path)):
        assert found["longest"] < 5.0
        assert found["close"] < GENEROUS_S


def test_a_run_folder_that_answers_late_holds_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begin_attempt = threading.Event(), RunFolder.begin_attempt
    threads: list[threading.Thread] = []

    def late(folder: RunFolder, **options: Any) -> None:
        threads.append(threading.current_thread())
        if threads[0] is not threading.main_thread():
            assert answers.wait(GENEROUS_S)
        begin_attempt(folder, **options)

    monkeypatch.setattr(RunFolder, "begin_attempt", late)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path), writer="thread")
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
    assert threading.main_thread() not in threads
    answers.set()
    monitor.close()
    assert [record["step"] for record in read_run(tmp_path / "run").records] == [1, 2, 3]
