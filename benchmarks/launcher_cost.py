"""What the hooks of `distmon run` add to a step that is not observed.

python -m benchmarks.launcher_cost
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import distmon
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import AutoStep

LAYERS, STEPS, ROUNDS = 74, 60, 12


def main() -> None:
    """Time blocks of steps that are driven by hand and by the hooks, in turn; print the medians."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(2, 8)
    with tempfile.TemporaryDirectory() as folder:
        monitor = distmon.attach(
            model, optimizer, interval=10**6, first_observation=10**6, run_dir=folder, sinks=()
        )
        assert isinstance(monitor, distmon.Monitor)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss, norm

        def by_hand() -> None:
            loss, norm = step()
            monitor.step(loss=loss, grad_norm=norm)

        times: dict[str, list[float]] = {"bare": [], "attach + step()": [], "hooks": []}
        for _ in range(ROUNDS):
            times["attach + step()"].append(_seconds(by_hand))
            following = Following(AutoStep(monitor, [optimizer]))
            times["hooks"].append(_seconds(lambda: step() and None))
            following.remove()
        monitor.close()
        for _ in range(ROUNDS):
            times["bare"].append(_seconds(lambda: step() and None))
    bare = statistics.median(times["bare"])
    print(f"{2 * LAYERS} parameters, {ROUNDS} rounds of {STEPS} steps, one thread")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:16} {1e6 * median:8.0f} us/step  {1e6 * (median - bare):+8.0f}")


def _seconds(step: Callable[[], None]) -> float:
    """Return the mean CPU time of a step in one block, which other processes do not change."""
    begin = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - begin) / STEPS


if __name__ == "__main__":
    main()
