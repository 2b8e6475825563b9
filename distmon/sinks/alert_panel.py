"""An alert as a panel on a console."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from distmon.rules.alert import Alert
from distmon.rules.base import name_some
from distmon.untrusted.terminal import printable

BAD: Final = "bold red"
SEVERITY_STYLES: Final = {"info": "cyan", "warning": "yellow", "critical": BAD}
PANEL_WIDTH: Final = 100


def alert_panel(alert: Alert, width: int = PANEL_WIDTH, model: str = "") -> Panel:
    """Return a panel with message, location and advice, colored by severity."""
    style = SEVERITY_STYLES[alert.severity]
    parts: list[RenderableType] = [Text(printable(alert.message))]
    location = Text()
    for label, names in (
        ("parameters", alert.params),
        ("layers", alert.layers),
        ("ranks", [str(rank) for rank in alert.ranks]),
    ):
        if names:
            location.append("\n" if location else "")
            location.append(f"{label}: ", style="bold")
            location.append(printable(name_some(names)))
    if location:
        parts.append(location)
    if alert.advice:
        advice = Table.grid(padding=(0, 1))
        advice.add_column(justify="right", style=style, no_wrap=True)
        advice.add_column()
        for number, text in enumerate(alert.advice, start=1):
            advice.add_row(f"{number}.", Text(printable(text)))
        parts.append(Padding(advice, (1, 0, 0, 0)))
    of_model = f" of {model}" if model else ""
    head = f"{alert.severity.upper()} {alert.rule} at step {alert.step}{of_model}"
    title = Text(printable(head), style=style)
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        border_style=style,
        padding=(0, 1),
        width=width,
    )
