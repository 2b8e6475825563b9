from __future__ import annotations

import multiprocessing
import pickle
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tiny_training import CPU, TINY_MATRICES

from benchmarks.contenders import CONTENDERS
from benchmarks.overhead.models import Matrices
from benchmarks.overhead.workloads import square_loss
from distmon.bench.contender import Contender, Session, find
from distmon.bench.counting import count
from distmon.bench.footprint import FootprintError, footprint, measure_here
from distmon.bench.memory import meter_for
from distmon.bench.training import Workload
from distmon.native import status

MIB = 2**20
WIDE = Workload(
    "wide", "10 matrices of 1 MiB", partial(Matrices, 10, 512), partial(square_loss, 2, 512)
)


def _of(name: str, workload: Workload, folder: Path) -> dict[str, float]:
    return measure_here(workload, "fp32", _find(name), CPU, folder)


def _find(name: str) -> Contender:
    (contender,) = find([name], CONTENDERS)
    return contender


def test_operations_and_waits(tmp_path: Path) -> None:
    clone = _of("naive clone", TINY_MATRICES, tmp_path / "clone")
    assert clone["launches"] == 10 * 4  # clone, subtract and two norms
    assert clone["host_syncs"] == 10 * 2
    norm = _of("foreach_norm", TINY_MATRICES, tmp_path / "norm")
    assert (norm["launches"], norm["host_syncs"]) == (1, 0)
    hooks = _of("naive hooks", TINY_MATRICES, tmp_path / "hooks")
    assert (hooks["launches"], hooks["host_syncs"]) == (10, 10)


def test_the_monitor_does_not_wait(tmp_path: Path) -> None:
    native = status()
    if native.module is None:
        pytest.skip(f"on the CPU only the native module reads without a wait: {native.reason}")
    assert _of("distmon sampled", TINY_MATRICES, tmp_path)["host_syncs"] == 0


def test_a_clone_is_seen() -> None:
    # In a process of its own, as the benchmark does it: in this one, whatever earlier tests left
    # running allocates and frees too.
    found = footprint(WIDE, "fp32", _find("naive clone"), CPU)
    # Ten clones and one difference; what else an optimizer step allocates is in it too.
    assert 10.5 * MIB < found["extra_memory"] < 22 * MIB
    assert found["kept_memory"] < 5 * MIB


def _fail(_: object) -> Session:
    raise ValueError("no such monitor")


def test_a_failure_is_reported() -> None:
    failing = Contender("fails", "fails", "directly", _fail)
    with pytest.raises(FootprintError, match="ValueError: no such monitor"):
        footprint(WIDE, "fp32", failing, CPU)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_another_process_can_be_given_every_contender(contender: Contender) -> None:
    assert pickle.loads(pickle.dumps(contender)).name == contender.name


def _send_peaks(connection: Connection) -> None:
    """Send what a meter finds after 64 MiB were released, and around 32 MiB."""
    meter = meter_for(CPU)
    if meter is None:
        connection.send(None)
        return
    torch.ones(64 * MIB // 4)
    meter.release()
    before = meter.begin()
    idle = meter.peak() - before
    torch.ones(32 * MIB // 4)
    busy = meter.peak() - before
    meter.release()
    connection.send((idle, busy, meter.now() - before))


def test_the_peak_is_that_since_the_beginning() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_peaks, args=(theirs,))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    if found is None:
        pytest.skip("this system does not report the peak of a process")
    idle, busy, released = found
    assert idle < 8 * MIB
    assert 31 * MIB < busy < 48 * MIB
    assert released < 8 * MIB


def test_views_are_no_operations_and_fetching_waits() -> None:
    x = torch.ones(3, 3)
    found = count(lambda: (x.t().view(3, 3), x + 1, x.sum().item(), x.cpu()))
    assert found.launches == 2
    assert found.host_syncs == 2
    assert found.collectives == found.sent_bytes == 0
