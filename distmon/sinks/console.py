"""One readable line per observation, and a panel per alert."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from distmon.config import MonitorConfig
from distmon.record.record import Record
from distmon.rules.advice import clip_in_force
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_names import model_label
from distmon.sinks.alert_panel import BAD, PANEL_WIDTH, alert_panel
from distmon.sinks.base import SinkContext
from distmon.sinks.short_numbers import (
    count,
    duration,
    exponent,
    loss,
    percent,
    plural,
    short,
    thousands,
)
from distmon.untrusted.terminal import printable, terminal

SHORTEST_NAME: Final = 8
LOG_WIDTH: Final = 160
SHOWN_ERROR: Final = 0.02
"""Relative standard error of the gradient norm from which on it is shown."""


def open_sink(context: SinkContext) -> ConsoleSink:
    """Return the sink of a monitor."""
    console = context.console or terminal()
    path = context.folder.path
    return ConsoleSink(console, context.config.total_steps, str(path), model_label(path))


def announce(console: Console, folder: RunFolder, config: MonitorConfig) -> None:
    """Print what is monitored, how it is read, where it goes and when the first record comes."""
    first, interval = config.first_observation, config.interval
    line = opening_line(folder.reading, len(folder.parameters), interval, min(first, interval))
    line = f"{line}; run folder {folder.path}"
    console.print(Text(line, style="dim"), highlight=False, soft_wrap=True)


class ConsoleSink:
    """Prints to a rich console. A trainer with a progress bar passes the bar's console."""

    def __init__(
        self,
        console: Console,
        total_steps: int | None = None,
        folder: str = "",
        label: str = "",
    ) -> None:
        """`folder` is named in the summary at the end; without it there is none.

        `label` begins the lines, where several models of a script print theirs.
        """
        self._console = console
        self._total_steps = total_steps
        self._folder = folder
        self._label = label
        self._records = 0
        self._alerts: Counter[str] = Counter()
        self._own_seconds = self._seconds = 0.0

    def record(self, record: Record) -> None:
        # rich assumes that a log file is 80 columns wide, which would cut half of the line.
        width = self._console.width if self._console.is_terminal else LOG_WIDTH
        label = f"{self._label} " if self._label else ""
        line = record_line(record, self._total_steps, width - len(label))
        self._print(Text.assemble((label, "dim"), line))
        self._records += not record.partial
        elapsed = record.ranks.get("elapsed_seconds")
        if elapsed is not None:
            self._seconds += float(elapsed.max())
            self._own_seconds += float(record.ranks["monitor_seconds"].max())
        for fault in record.faults:
            self._print(Text(printable(f"  fault at step {record.step}: {fault}"), style="yellow"))

    def alert(self, alert: Alert) -> None:
        width = min(self._console.width, PANEL_WIDTH)
        with self._console:  # written at once
            erase_bar(self._console)
            self._console.print(alert_panel(alert, width, self._label))
        self._alerts[alert.severity] += 1

    def close(self) -> None:
        """Print a summary: records, alerts, cost, folder."""
        if not self._folder:
            return
        alerts = [plural(n, "alert", f"{severity} ") for severity, n in self._alerts.items()]
        parts = [plural(self._records, "record"), *(alerts or ["no alerts"])]
        if self._seconds:
            share = 100 * self._own_seconds / self._seconds
            parts.append(f"own cost {share:.2g}% of the training time")
        self._print(Text(f"distmon: {', '.join(parts)}; distmon show {self._folder}", style="dim"))

    def _print(self, line: Text) -> None:
        with self._console:  # written at once
            erase_bar(self._console)
            self._console.print(line, highlight=False, soft_wrap=True)


def print_formatted(console: Console, text: str) -> None:
    """Print what a sink in another process has formatted for this console."""
    if type(console) is Console and not (_has_bar(console) or console.record or console.quiet):
        console.file.write(text)  # rich would take half a millisecond to come to the same
        console.file.flush()
        return
    with console:
        erase_bar(console)
        console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)


def erase_bar(console: Console) -> None:
    """Erase the line of a terminal on which a progress bar like tqdm's has left the cursor.

    The bar draws itself anew below. A bar of this console's own (rich) makes room by itself.
    """
    if console.is_terminal and not _has_bar(console):
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _has_bar(console: Console) -> bool:
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def opening_line(
    reading: Mapping[str, Any], parameters: int, interval: int, first: int | None = None
) -> str:
    """Return what is monitored, when, and how much of it is read; `reading` as in `run.json`.

    `first` is the first observed step, where it is before `interval`.
    """
    if not reading:
        return ""
    total = max(1, reading["elements"])
    when = f"every {plural(interval, 'step')}" if interval > 1 else "every step"
    if first is not None and first < interval:
        when = f"at step {first}, then {when}"
    gradients = reading["gradient_elements"] / total
    others = reading["sampled_elements"] / total
    if min(gradients, others) >= 1:
        what = "every element"
    elif gradients >= 1:
        what = f"all gradients, {percent(others)} of weights and updates"
    else:
        what = f"{percent(gradients)} of the gradients, {percent(others)} of weights and updates"
    size = f"{plural(parameters, 'parameter')} ({thousands(total)} elements)"
    return f"distmon: {size} read {when}: {what}"


@dataclass(frozen=True)
class _Field:
    text: str
    keep: int
    """Priority; fields with the lowest one are dropped when the line is too long."""
    style: str = ""


def record_line(record: Record, total_steps: int | None = None, width: int | None = None) -> Text:
    """Return the console line of a record, without metrics that were not measured.

    With a `width`, shorten the name of the parameter with the largest update, and then drop fields
    by priority until the line fits.
    """
    fields = _fields(record, total_steps, None)
    if width is None:
        return _join(fields)
    if _length(fields) > width:
        room = len(_name_of_largest(record)) - (_length(fields) - width)
        fields = _fields(record, total_steps, room if room >= SHORTEST_NAME else 0)
    while len(fields) > 1 and _length(fields) > width:
        fields.remove(min(fields, key=lambda field: field.keep))
    return _join(fields)


def _fields(record: Record, total_steps: int | None, longest_name: int | None) -> list[_Field]:
    of_total = "" if total_steps is None else f"/{total_steps}"
    fields = [_Field(f"step:{record.step}{of_total}", 100)]
    if not record.applied and not record.partial:
        fields.append(_Field("skipped", 99, "bold yellow"))

    def add(label: str, tag: str, format_value: Callable[[float], str], keep: int) -> None:
        value = record.metrics.get(tag)
        if value is not None:
            fields.append(_field(label, value, format_value, keep))

    add("loss", "train/step_loss", loss, 90)
    add("ema", "train/step_loss_ema", short, 50)
    add("val_loss", "evaluation/val_loss", loss, 75)
    add("update_ratio", "monitor/update_ratio_median", exponent, 80)
    largest = record.metrics.get("monitor/update_ratio_max")
    if largest is not None:
        name = _shorten(_name_of_largest(record), longest_name)
        field = _field("max", largest, exponent, 25)
        fields.append(_Field(field.text + (f"({name})" if name else ""), field.keep, field.style))
    fields += _grad_norm(record)
    add("gain", "gradient_monitor/mean_gain", short, 45)
    add("frozen", "monitor/frozen_count", count, 60)
    add("dead_units", "inside/dead_fraction_max", lambda value: f"{value:.0%}", 18)
    add("logit", "inside/attention_logit_max", short, 17)
    add("expert_load", "inside/expert_load_max", lambda value: f"{value:.1f}x", 16)
    add("spectral", "inside/spectral_norm_max", short, 15)
    for label, tag in (
        ("nan_params", "debug/nan_param_count"),
        ("inf_params", "debug/inf_param_count"),
    ):
        value = record.metrics.get(tag)
        if value is not None and value != 0:
            fields.append(_Field(f"{label}:{count(value)}", 95, BAD))
    add("lr", "train/lr", exponent, 30)
    add("tok/s", "performance/tokens_per_second", thousands, 40)
    seconds = record.metrics.get("performance/step_seconds")
    if seconds is not None:
        good = math.isfinite(seconds)
        text = f"{duration(seconds) if good else seconds}/step"
        fields.append(_Field(text, 35, "" if good else BAD))
    add("monitor", "performance/monitor_fraction", lambda value: f"{100 * value:.2f}%", 20)
    return fields


def _grad_norm(record: Record) -> list[_Field]:
    """The total gradient norm: with its error where it is an estimate, and what clipping left."""
    norm = record.metrics.get("monitor/grad_norm")
    if norm is None:
        has_grad = record.params.columns.get("has_grad", np.zeros(0))
        return [_Field("grad_norm:unknown", 70)] if (has_grad > 0).any() else []
    field = _field("grad_norm", norm, short, 70)
    error = record.metrics.get("monitor/grad_norm_stderr", 0.0)
    text = field.text
    if math.isfinite(norm) and norm > 0 and error > SHOWN_ERROR * norm:
        text += f"±{100 * error / norm:.0f}%"
    clip = clip_in_force(record)
    if clip is not None:
        text += f"(clipped {short(clip)})"
    return [_Field(text, field.keep, field.style)]


def _field(label: str, value: float, format_value: Callable[[float], str], keep: int) -> _Field:
    if math.isfinite(value):
        return _Field(f"{label}:{format_value(value)}", keep)
    return _Field(f"{label}:{value}", 95, BAD)


def _length(fields: list[_Field]) -> int:
    return sum(len(field.text) for field in fields) + len(fields) - 1


def _join(fields: list[_Field]) -> Text:
    line = Text(" ").join(Text(printable(field.text), style=field.style) for field in fields)
    line.no_wrap = True
    line.overflow = "ignore"
    return line


def _name_of_largest(record: Record) -> str:
    ratios = record.params.columns.get("update_ratio")
    if ratios is None or not np.isfinite(ratios).any():
        return ""
    row = int(np.argmax(np.where(np.isfinite(ratios), ratios, -np.inf)))
    return record.params.names[row].removesuffix(".weight")


def _shorten(name: str, longest: int | None) -> str:
    """Keep the end of a name, which is more specific than its beginning: `…attn.qkv`."""
    if longest is None or len(name) <= longest:
        return name
    return f"…{name[1 - longest :]}" if longest else ""
