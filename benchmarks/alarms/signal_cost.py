"""What the signals of the training loop cost: `python -m benchmarks.alarms.signal_cost`.

Times the calls and hooks of `distmon.collect.signals` in a GPT of 12 layers that is observed every
fifth step, and compares an observation's sum with all that distmon does in the training thread for
it (`monitor_seconds` of the record). Host time of one process; nothing here is a GPU time.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import distmon
from benchmarks.alarms.kinds.language import Gpt
from distmon.runtime.self_cost import LOST

INTERVAL, STEPS, WIDTH, DEPTH = 5, 200, 128, 12
CALLS = ("step_begins", "optimizer_begins", "take")
"""Methods of `StepSignals`."""
HOOKS = "hooks in forward and backward"
SKIPPED = 20
"""Steps at the start that are left out."""


class Clock:
    """Adds up the time of each step in the calls."""

    def __init__(self) -> None:
        self.step = 0
        self.by_step: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to the step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.by_step[self.step][name] += time.perf_counter() - begin

        return call


def measure(folder: Path, steps: int = STEPS) -> tuple[Clock, list[float]]:
    """Train; return the times, and the monitor's own seconds of each record."""
    clock = Clock()
    torch.manual_seed(0)
    model = Gpt(DEPTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    settings = {"run_dir": folder, "sinks": ["jsonl"], "interval": INTERVAL, "budget": None}
    with distmon.attach(model, optimizer, settings) as monitor, ExitStack() as patches:
        signals = monitor.telemetry.signals
        for name in CALLS:
            timed = clock.timed(name, getattr(signals, name))
            patches.enter_context(mock.patch.object(signals, name, timed))
        for step in range(1, steps + 1):
            clock.step, hooks = step, signals.hook_seconds
            tokens = torch.randint(0, 27, (4, 17))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            monitor.step(loss=loss.detach())
            clock.by_step[step][HOOKS] += signals.hook_seconds - hooks
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    late = [record for record in records if record["step"] > SKIPPED]
    # A record says what training loses; the clock of this benchmark has the time of the thread.
    return clock, [record["ranks"]["monitor_seconds"][0] / LOST for record in late]


def main() -> int:
    """Print the medians."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        clock, seconds = measure(Path(scratch) / "run")
    late = {step: times for step, times in clock.by_step.items() if step > SKIPPED}
    observed = [sum(t.values()) for step, t in late.items() if step % INTERVAL == 0]
    idle = [sum(t.values()) for step, t in late.items() if step % INTERVAL not in (0, 4)]
    one, other = statistics.median(observed) * 1e3, statistics.median(idle) * 1e6
    print(f"{len(observed)} observations: signals {one:.3f} ms, idle step {other:.1f} us")
    if seconds:
        whole = statistics.median(seconds) * 1e3
        print(f"all of distmon between two records {whole:.3f} ms; signals {one / whole:.1%} of it")
    for name in (*CALLS, HOOKS):
        each = [t[name] for step, t in late.items() if step % INTERVAL == 0]
        print(f"  {name}: {statistics.median(each) * 1e3:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
