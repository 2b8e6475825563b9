"""What a person sees: a bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.25
PLAIN_WIDTH = 160  # a log file has no width; the default of 80 would wrap lines


def make_console(is_main: bool) -> Console:
    """Return the one console of the process. What prints through it appears above the bar."""
    console = Console(quiet=not is_main, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


class Display:
    """The progress of one run. `shown` is the context of the training loop."""

    def __init__(self, console: Console, steps: int, first: int, tokens_per_step: int) -> None:
        self.console, self.steps, self.tokens_per_step = console, steps, tokens_per_step
        self.has_bar = console.is_interactive and not console.quiet
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=1 / REFRESH_SECONDS,
            expand=True,
        )
        self.shown = self._bar if self.has_bar else nullcontext()
        self._task = self._bar.add_task("", total=steps, completed=first, loss="-", speed="-")
        self._last_time, self._last_step = time.perf_counter(), first

    def advance(self, step: int, loss: torch.Tensor) -> None:
        """Move the bar. Reads the loss, which waits for the device, a few times a second only."""
        recently = time.perf_counter() - self._last_time < REFRESH_SECONDS
        if self.has_bar and (not recently or step == self.steps):
            loss_text, speed = f"{float(loss):.3f}", f"{self._tokens_per_second(step):,.0f}"
            self._bar.update(self._task, completed=step, loss=loss_text, speed=speed)

    def log(self, step: int, loss: float, lr: float) -> None:
        """Print the plain line about a step, where there is no bar."""
        speed = self._tokens_per_second(step)
        self.line(f"step:{step}/{self.steps} loss:{loss:.4f} lr:{lr:.2e} tokens/s:{speed:.0f}")

    def line(self, text: str, style: str | None = None) -> None:
        """Print above the bar. Nothing is taken for markup: names may hold brackets."""
        self.console.print(text, style=style, markup=False)

    def _tokens_per_second(self, step: int) -> float:
        now = time.perf_counter()
        steps, seconds = step - self._last_step, now - self._last_time
        self._last_time, self._last_step = now, step
        return steps * self.tokens_per_step / seconds
