"""`distmon watch RUN`: a live view of a run in the terminal, from 80 columns on."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from distmon.cli.severity_colors import SEVERITY_COLORS
from distmon.report.recent import RecentRun
from distmon.report.sparkline import sparkline

_LINES: Final = (
    ("average", "train/step_loss_ema", False),
    ("gradient norm", "monitor/grad_norm", True),
    ("update ratio", "monitor/update_ratio_median", True),
    ("tokens/s", "performance/tokens_per_second", False),
)
_STATE_COLORS: Final = {
    "running": "cyan",
    "finished": "green",
    "alerting": "yellow",
    "died": "red",
    "empty": "dim",
}
_PARAMS: Final = 5
_RANKS: Final = 4
_ALERTS: Final = 4


def watch(console: Console, path: Path, every: float, once: bool) -> None:
    """Show the run until Ctrl-C; `once`, or without a terminal, print it and return."""
    run = RecentRun(path)
    run.update()
    if once or not console.is_terminal:
        console.print(render(run, console.width, time.time()))
        return
    try:
        with Live(
            render(run, console.width, time.time()),
            console=console,
            screen=False,
            refresh_per_second=4,
        ) as live:
            while True:
                time.sleep(every)
                run.update()
                live.update(render(run, console.width, time.time()))
    except KeyboardInterrupt:
        return


def render(run: RecentRun, width: int, now: float) -> RenderableType:
    """Return what is shown, no wider than `width`."""
    parts: list[RenderableType] = [_head(run, now)]
    if run.waiting:
        parts.append(Text(f"waiting: {run.waiting}", style="yellow"))
    parts += [_sparklines(run, width), _params(run, width), _ranks(run), *_alerts(run)]
    return Group(*parts)


def _head(run: RecentRun, now: float) -> Text:
    state, why = run.state(now)
    attempts = run.info["attempts"]
    head = Text.assemble(
        (run.path.resolve().name, "bold"), "  ", (state, f"bold {_STATE_COLORS[state]}"), f": {why}"
    )
    if attempts:
        ranks = attempts[-1].get("world_size") or 1
        head.append(f"; {ranks} rank{'s' * (ranks != 1)}")
        if len(attempts) > 1:
            head.append(f"; attempt {attempts[-1]['attempt']} from {attempts[-1]['resumed_from']}")
    return head


def _sparklines(run: RecentRun, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    room = max(10, min(100, width) - 14 - 10 - 20 - 4)
    rows = [("loss", [*run.losses], False)]
    rows += [(name, run.series(tag), log) for name, tag, log in _LINES]
    for name, values, log in rows:
        if values:
            finite = [value for value in values if math.isfinite(value)]
            span = f"{_number(min(finite))} to {_number(max(finite))}" if finite else ""
            line = Text(sparkline(values, room, log=log), style="cyan", no_wrap=True)
            table.add_row(f"{name:13}", Text(_number(values[-1]), style="bold"), line, span)
    if not run.records:
        table.add_row("no observation yet")
    return table


def _params(run: RecentRun, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    room = max(20, min(56, width - 32))
    table.add_column("largest updates", no_wrap=True, max_width=room)
    table.add_column("update ratio", justify="right")
    table.add_column("gradient norm", justify="right")
    for param in run.worst_params(_PARAMS):
        ratio = _number(param.update_ratio)
        style = "red" if not math.isfinite(param.update_ratio) else ""
        table.add_row(
            Text(_tail(param.name, room)), Text(ratio, style=style), _number(param.grad_norm)
        )
    return table if table.row_count else Table.grid()


def _ranks(run: RecentRun) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("slowest ranks", "step", "slower than the median in"):
        table.add_column(heading)
    for line in run.slowest_ranks(_RANKS):
        behind = f"{line.phase} by {_duration(line.excess_seconds)}"
        shown = behind if line.excess_seconds > 0 else ""
        table.add_row(f"rank {line.rank}", _duration(line.step_seconds), shown)
    return table if table.row_count > 1 else Table.grid()


def _alerts(run: RecentRun) -> list[Text]:
    lines = []
    for alert in [*run.alerts][-_ALERTS:][::-1]:
        color = SEVERITY_COLORS.get(alert["severity"], "white")
        head = (f"{alert['severity']} {alert['rule']} at step {alert['step']}: ", f"bold {color}")
        lines.append(Text.assemble(head, str(alert["message"])[:300]))
    return lines or [Text("no alerts", style="dim")]


def _tail(name: str, most: int) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN/Inf"
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:.3g}M" if abs(value) >= 1e6 else f"{value / 1e3:.3g}k"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
