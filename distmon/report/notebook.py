"""A figure of a run for notebooks."""

from __future__ import annotations

import os
from typing import Any, Final

from distmon.errors import ConfigError
from distmon.report import series
from distmon.runs.reader import RunTail

BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
SEVERITY_LINES: Final = {"info": ("#56B4E9", "dot"), "warning": ("#E69F00", "dash")}
PANELS: Final = (
    ("Gradient norm", True, {"monitor/grad_norm": BLUE, "monitor/applied_grad_norm": ORANGE}),
    (
        "Update ratio",
        True,
        {"monitor/update_ratio_median": BLUE, "monitor/update_ratio_max": ORANGE},
    ),
    ("Tokens per second", False, {"performance/tokens_per_second": BLUE}),
)
"""Title, whether the axis is logarithmic, and the metrics with their colors."""


def plot_run(path: str | os.PathLike[str]) -> Any:
    """Return a plotly figure of a run folder: losses, gradients, updates, speed, alerts."""
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise ConfigError("plots need a package: pip install 'distmon[report]'") from None
    news = RunTail(path).read()
    titles = ["Loss", *(title for title, _, _ in PANELS)]
    figure = make_subplots(2, 2, subplot_titles=titles, horizontal_spacing=0.08)
    loss = series.losses(news.losses, news.loss_ema)
    _line(figure, 1, 1, "loss", loss["steps"], loss["mean"], BLUE)
    _line(figure, 1, 1, "moving average", loss["steps"], loss["ema"], ORANGE)
    found = series.evaluations(news.records)
    steps = [each["step"] for each in found]
    _line(figure, 1, 1, "validation", steps, [each["val_loss"] for each in found], GREEN)
    scalars = series.scalars(news.records)
    for place, (_, is_log, tags) in enumerate(PANELS, start=1):
        row, column = 1 + place // 2, 1 + place % 2
        for tag, color in tags.items():
            if tag in scalars["values"]:
                name = tag.rpartition("/")[2].replace("_", " ")
                _line(figure, row, column, name, scalars["steps"], scalars["values"][tag], color)
        if is_log:
            figure.update_yaxes(type="log", row=row, col=column)
    for alert in news.alerts[-50:]:
        color, dash = SEVERITY_LINES.get(alert["severity"], ("#C0390B", "solid"))
        figure.add_vline(x=alert["step"], line={"color": color, "dash": dash, "width": 1})
    if not news.records and not news.losses:
        figure.add_annotation(
            text="No record yet: nothing was observed, or the sink jsonl is off.",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
    figure.update_layout(height=560, margin={"l": 50, "r": 20, "t": 40, "b": 40})
    return figure


def _line(
    figure: Any, row: int, column: int, name: str, x: list[Any], y: list[Any], color: str
) -> None:
    if x:
        mode = "lines" if len(x) > 60 else "lines+markers"
        trace = {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y}
        figure.add_trace({**trace, "line": {"color": color}}, row=row, col=column)
