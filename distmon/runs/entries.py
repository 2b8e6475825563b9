"""What a run folder may contain: the type of every value in `run.json`, records and alerts.

The one place where untrusted content becomes values that the rest of the package can rely on. A
value of another type is left out and noted; keys that are not listed here are passed on as they
are, so a key that gets a reader gets a line here.
"""

from __future__ import annotations

from typing import Any, Final

from distmon.errors import RunFolderError
from distmon.metrics import current_name
from distmon.untrusted.documents import check_plain
from distmon.untrusted.values import (
    BadValueError,
    Convert,
    Dropped,
    boolean,
    count,
    each_item,
    each_value,
    integer,
    mapping,
    number,
    one_of,
    optional,
    sequence,
    structure,
    text,
)

FORMAT: Final = 2
"""Number of the format of a run folder, in `run.json`; 0.1.0 wrote none, which is 1."""

_EVALUATION: Final = structure(
    {"step": integer, "val_loss": number},
    {
        "number": (integer, 0),
        "epoch": (optional(number), None),
        "train_loss": (optional(number), None),
        "improvement": (optional(number), None),
        "train_improvement": (optional(number), None),
        "gap": (optional(number), None),
        "unchanged": (integer, 0),
    },
)
_PLACE: Final = structure(
    {"param": text, "rank": integer},
    dict.fromkeys(("weight_nan", "weight_inf", "grad_nan", "grad_inf"), (integer, 0)),
)
_NONFINITE: Final = structure(
    {"step": integer, "signal": text, "places": sequence(_PLACE)},
    {"param_count": (integer, 0), "counted_at": (integer, 0)},
)
_DESYNC: Final = structure(
    {"ranks": sequence(integer), "params": sequence(text)},
    {"reference": (integer, 0), "tie": (boolean, False)},
)
_ENDS: Final = structure(
    {
        "blocks": sequence(text),
        "input_norm": sequence(number),
        "output_norm": sequence(number),
    }
)


def _gain(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = _ENDS(value)
    if len({len(column) for column in found.values()}) != 1:
        raise BadValueError
    return found


_RECORD: Final[dict[str, Convert]] = {
    "time": number,
    "world_size": count,
    "observation": integer,
    "applied": boolean,
    "partial": boolean,
    "mfu_source": text,
    "flow": optional(_gain),
    "nonfinite": optional(_NONFINITE),
    "desync": optional(_DESYNC),
}
_LOSSES: Final[dict[str, Convert]] = {
    "loss_steps": integer,
    "loss_values": number,
    "loss_ema": number,
}
_VALUES: Final[dict[str, Convert]] = {
    "metrics": number,
    "ranks": sequence(number),
    "tasks": number,
}
"""Mappings of which single values may be bad."""
_ITEMS: Final[dict[str, Convert]] = {"evaluations": _EVALUATION, "faults": text}
"""Lists of which single items may be bad."""
_ALERT: Final[dict[str, Convert]] = {
    "time": number,
    "params": sequence(text),
    "layers": sequence(text),
    "ranks": sequence(integer),
    "advice": sequence(text),
    "measured": optional(number),
    "threshold": optional(number),
}
_GAP: Final[dict[str, Convert]] = {
    "count": count,
    "last_step": integer,
    "sink": text,
    "what": text,
    "reason": text,
}
_SEVERITY: Final = one_of("info", "warning", "critical")
_ATTEMPT: Final = structure(
    {"attempt": count, "resumed_from": integer},
    {"started": (text, ""), "world_size": (count, 1)},
)
_PARAMETER: Final = structure(
    {"name": text},
    {
        "shape": (sequence(integer), []),
        "dtype": (text, ""),
        "requires_grad": (boolean, True),
        "sampled": (integer, 0),
    },
)
_READING: Final[dict[str, Convert]] = {
    "text": text,
    "elements": integer,
    "gradient_elements": integer,
    "sampled_elements": integer,
}


def record(entry: dict[str, Any], dropped: Dropped) -> dict[str, Any]:
    """Return a line of `records.jsonl`; BadValueError when it belongs to no step."""
    _place(entry)
    _convert(entry, _RECORD, dropped)
    for key, convert in _VALUES.items():
        if key in entry:
            entry[key] = each_value(entry[key], convert, key, dropped)
    for key, convert in _ITEMS.items():
        if key in entry:
            items = [] if entry[key] is None else entry[key]
            entry[key] = each_item(items, convert, key, dropped)
    for key, convert in _LOSSES.items():
        _convert(entry, {key: sequence(convert)}, dropped)
    for key in ("metrics", "ranks"):
        named = entry.setdefault(key, {})
        entry[key] = {current_name(name): value for name, value in named.items()}
    return entry


def alert(entry: dict[str, Any], dropped: Dropped) -> dict[str, Any]:
    """Return a line of `alerts.jsonl`; BadValueError without step, rule, severity and message."""
    _place(entry)
    try:
        for key, convert in (("rule", text), ("severity", _SEVERITY), ("message", text)):
            entry[key] = convert(entry[key])
    except KeyError:
        raise BadValueError from None
    _convert(entry, _ALERT, dropped)
    return entry


def gap(entry: dict[str, Any], dropped: Dropped) -> dict[str, Any]:
    """Return a line of `gaps.jsonl`; BadValueError when it belongs to no step."""
    _place(entry)
    _convert(entry, _GAP, dropped)
    return entry


def end(entry: dict[str, Any], _: Dropped) -> dict[str, Any]:
    """Return a line of `ends.jsonl`; BadValueError when it belongs to no step."""
    _place(entry)
    entry["observations"] = count(entry.get("observations"))
    return entry


def run_info(content: Any, origin: str, dropped: Dropped) -> dict[str, Any]:
    """Return the content of `run.json`; RunFolderError when it is no description of a run."""
    if not isinstance(content, dict) or not isinstance(content.get("attempts"), list):
        raise RunFolderError(_foreign(origin))
    info = mapping(content)
    if (newer := _format(info)) > FORMAT:
        raise RunFolderError(
            f"{origin} was written by a newer version of distmon (format {newer}; this version "
            f"reads up to {FORMAT}): upgrade distmon to read it"
        )
    try:
        info["attempts"] = [_ATTEMPT(entry) for entry in info["attempts"]]
    except BadValueError:
        raise RunFolderError(_foreign(origin)) from None
    for key in ("config", "versions", "reading"):
        value = info.setdefault(key, {})
        try:
            check_plain(value)
            info[key] = mapping(value)
        except ValueError:
            dropped.add(key)
            info[key] = {}
    info["versions"] = each_value(info["versions"], text, "versions", dropped)
    info["parameters"] = each_item(info.get("parameters", []), _PARAMETER, "parameters", dropped)
    info["reading"] = _whole(info["reading"], _READING, "reading", dropped)
    config = info["config"]
    for key, convert in (("total_steps", optional(count)), ("interval", count), ("rules", mapping)):
        if key in config:
            try:
                config[key] = convert(config[key])
            except BadValueError:
                dropped.add(f"config.{key}")
                del config[key]
    if not isinstance(info.get("wandb_id"), str | None):
        dropped.add("wandb_id")
        info["wandb_id"] = None
    return info


def _place(entry: dict[str, Any]) -> None:
    entry["step"] = integer(entry.get("step"))
    entry["attempt"] = count(entry.get("attempt", 0))


def _convert(entry: dict[str, Any], converters: dict[str, Convert], dropped: Dropped) -> None:
    for key, convert in converters.items():
        if key in entry:
            try:
                entry[key] = convert(entry[key])
            except BadValueError:
                dropped.add(key)
                del entry[key]


def _whole(
    value: dict[str, Any], converters: dict[str, Convert], path: str, dropped: Dropped
) -> dict[str, Any]:
    """Return all of a mapping whose parts only make sense together, or nothing of it."""
    if not value:
        return {}
    try:
        return {**value, **{key: convert(value[key]) for key, convert in converters.items()}}
    except (KeyError, BadValueError):
        dropped.add(path)
        return {}


def _format(info: dict[str, Any]) -> int:
    found = info.get("format", 1)
    return found if isinstance(found, int) and not isinstance(found, bool) else 1


def _foreign(origin: str) -> str:
    return (
        f"{origin} was not written by distmon: it has no list of numbered attempts; "
        "use another folder"
    )
