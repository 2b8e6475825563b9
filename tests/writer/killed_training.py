"""A training process that is killed; started by `test_writer_process.py` with its run folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

import distmon

STEPS = 12


def say(what: str, value: object) -> None:
    """Print a line whole: between the writes of `print` the console sink may print its own."""
    sys.stdout.write(f"{what} {value}\n")


def main(folder: str) -> None:
    """Train, print what the test wants to know, and end without a word."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()  # torch imports some of its modules when they are first used
    sinks = ("console", "jsonl", "arrow", "tensorboard")
    monitor = distmon.attach(model, optimizer, interval=1, run_dir=folder, sinks=sinks, budget=None)
    assert isinstance(monitor, distmon.Monitor)
    before = {*sys.modules}
    for _ in range(STEPS):
        monitor.step(loss=step())
    monitor.cycle.settle(60)
    say("writer", monitor.cycle.worker.process.pid)  # type: ignore[attr-defined]
    say("imported", sorted({*sys.modules} - before))
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("distmon")}
    say("threads", sorted(threads))
    child = os.fork()  # as a data loader does: it has the pipes, too, and lives longer
    if child == 0:
        os.close(1)
        os.close(2)
        time.sleep(600)
    say("child", child)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
