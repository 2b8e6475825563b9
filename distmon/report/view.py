"""The view of a run: everything that the pages show, as plain values of bounded size.

The report embeds it, `serve` sends it and then the views of what is new, which the page appends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from distmon.report import series
from distmon.report.encoding import short_name
from distmon.report.param_history import Layout, ParamHistory
from distmon.report.run_state import run_state
from distmon.runs.reader import News

MAX_ALERTS: Final = 500
MAX_TEXT: Final = 2000


def build_view(name: str, news: News, *, globs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the view of what was read. `globs` select parameters that must have percentiles."""
    return view_and_layout(name, news, globs=globs)[0]


def view_and_layout(
    name: str, news: News, *, globs: Sequence[str] = (), layout: Layout | None = None
) -> tuple[dict[str, Any], Layout | None]:
    """Return the view and which parameters it has; with a `layout`, what continues that view."""
    history = ParamHistory(news.info.get("parameters", ()))
    history.add(news.params)
    named = [param for alert in news.alerts for param in alert.get("params", ())]
    params = history.view(named, globs, layout)
    now = time.time()
    return _view(name, news, params, now), history.layout or layout


def _view(name: str, news: News, params: dict[str, Any], now: float) -> dict[str, Any]:
    records = news.records
    return {
        "name": name,
        "time": now,
        "state": state_entry(news, records, news.alerts, now),
        "about": _about(news, params["total"]),
        "scalars": series.scalars(records),
        "loss": series.losses(news.losses, news.loss_ema),
        "evaluations": series.evaluations(records),
        "tasks": series.tasks(records),
        "gain": series.gradient_gain(records),
        "inside": series.inside(records),
        "ranks": series.rank_telemetry(records),
        "mfu_source": next((r["mfu_source"] for r in reversed(records) if r.get("mfu_source")), ""),
        "params": params,
        "alerts": _alerts(news.alerts),
        "alert_count": len(news.alerts),
        "faults": [
            {"step": record["step"], "text": str(fault)[:MAX_TEXT]}
            for record in records
            for fault in record.get("faults") or ()
        ][:MAX_ALERTS],
        "problems": [*news.problems],
    }


def state_entry(
    news: News,
    records: Sequence[Mapping[str, Any]],
    alerts: Sequence[Mapping[str, Any]],
    now: float,
) -> dict[str, str]:
    """Return the state of the run as the pages show it."""
    state, why = run_state(news.info, records, alerts, now, news.closed)
    return {"name": state, "why": why}


def _about(news: News, parameters: int) -> dict[str, Any]:
    info = news.info
    reading = info.get("reading") or {}
    return {
        "attempts": [
            {key: entry.get(key) for key in ("attempt", "resumed_from", "started", "world_size")}
            for entry in info["attempts"][-MAX_ALERTS:]
        ],
        "settings": flat(info.get("config", {})),
        "versions": flat(info.get("versions", {})),
        "reading": str(reading.get("text", "")),
        "elements": reading.get("elements"),
        "sampled": reading.get("sampled_elements"),
        "parameters": parameters,
        "total_steps": info.get("config", {}).get("total_steps"),
    }


def _alerts(alerts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the alerts in step order; of too many the most severe, then the newest."""
    rank = {"critical": 0, "warning": 1, "info": 2}
    kept = sorted(alerts, key=lambda a: (rank.get(a["severity"], 3), -a["step"]))[:MAX_ALERTS]
    return [
        {
            "rule": str(alert["rule"])[:MAX_TEXT],
            "severity": alert["severity"],
            "step": alert["step"],
            "attempt": alert["attempt"],
            "message": str(alert["message"])[:MAX_TEXT],
            "advice": [str(each)[:MAX_TEXT] for each in alert.get("advice", ())][:10],
            "params": [short_name(each) for each in alert.get("params", ())][:20],
            "layers": [short_name(each) for each in alert.get("layers", ())][:20],
            "ranks": [*alert.get("ranks", ())][:64],
        }
        for alert in sorted(kept, key=lambda a: a["step"])
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as `a.b.c` and text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}"[:MAX_TEXT], _text(value)))
    return rows[:1000]


def _text(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))[:MAX_TEXT] or "none"
    return str(value)[:MAX_TEXT]
