"""What a person sees: a bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import time
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.25
PLAIN_WIDTH = 160  # a log file has no width; the default of 80 would wrap lines


def make_console(is_main: bool) -> Console:
    """The one console of the process. Whatever prints through it appears above the bar."""
    console = Console(quiet=not is_main, highlight=False)
    if not console.is_terminal:
        console = Console(quiet=not is_main, highlight=False, width=PLAIN_WIDTH)
    return console


class Display:
    """Shows the progress of one run. Used as a context manager around the training loop."""

    def __init__(self, console: Console, steps: int, first: int, tokens_per_step: int) -> None:
        self.console = console
        self.steps = steps
        self.tokens_per_step = tokens_per_step
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
        self._task = self._bar.add_task("", total=steps, completed=first, loss="-", speed="-")
        self._shown_at = self._logged_at = time.perf_counter()
        self._shown_step = self._logged_step = first

    def __enter__(self) -> Display:
        if self.has_bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.has_bar:
            self._bar.stop()

    def advance(self, step: int, loss: torch.Tensor) -> None:
        """Move the bar. The loss is read, which waits for the device, a few times a second only."""
        now = time.perf_counter()
        if not self.has_bar or (now - self._shown_at < REFRESH_SECONDS and step < self.steps):
            return
        speed = (step - self._shown_step) * self.tokens_per_step / (now - self._shown_at)
        self._bar.update(
            self._task, completed=step, loss=f"{float(loss):.3f}", speed=f"{speed:,.0f}"
        )
        self._shown_at, self._shown_step = now, step

    def log(self, step: int, loss: float, lr: float) -> None:
        """The plain line about a step."""
        now = time.perf_counter()
        speed = (step - self._logged_step) * self.tokens_per_step / (now - self._logged_at)
        self._logged_at, self._logged_step = now, step
        self.line(f"step:{step}/{self.steps} loss:{loss:.4f} lr:{lr:.2e} tokens/s:{speed:.0f}")

    def line(self, text: str, style: str | None = None) -> None:
        """Print above the bar. Nothing is taken for markup: names may hold brackets."""
        self.console.print(text, style=style, markup=False)
