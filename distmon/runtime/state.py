"""The monitor's state in a checkpoint: its version, and how older versions are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from distmon.errors import DistmonError
from distmon.sampling.sample import hash48

STATE_VERSION: Final = 2


class StateVersionError(DistmonError):
    """A state of an unknown version, or none at all."""


def upgrade(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `state` in the current layout; StateVersionError when its version is unknown.

    What is inside is checked by the parts that load it: they raise.
    """
    if not isinstance(state, Mapping):
        raise StateVersionError(f"the monitor's state is a {type(state).__name__}, not a mapping")
    version = state.get("version")
    if version == STATE_VERSION:
        return state
    if version == 1:
        return _from_version_1(state)
    raise StateVersionError(
        f"the monitor's state has version {version!r} and this distmon reads 1 to {STATE_VERSION}"
    )


def _from_version_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the flat state of distmon 0.1 by owner."""
    record = {"loss_ema": state["loss_ema"], "gain": state.get("gain", ())}
    if "evaluations" in state:
        record["evaluations"] = state["evaluations"]
    return {
        "version": STATE_VERSION,
        "schedule": {"step": state["step"]},
        "finite_watch": {"nonfinite_known": state["known_bad"]},
        "cost": {"stretch": state.get("stretch", 1)},
        "cycle": {
            "losses": state["losses"],
            "evaluations": state.get("pending_evaluations", ()),
            "record": record,
            "rules": _rules_from_version_1(state["rules"]),
        },
    }


def _rules_from_version_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the count of alerts in each track."""
    rules = {}
    for name, rule in state["rules"].items():
        tracks = {
            key: {"alerts" if field == "told" else field: value for field, value in track.items()}
            for key, track in rule["tracks"].items()
        }
        rules[name] = {**rule, "tracks": tracks}
    return {"rules": rules}


def state_hash(state: Mapping[str, Any]) -> int:
    """Return 48 bits of what all ranks must have loaded alike: it decides which steps they observe.

    Ranks may load what each of them saved. Only rank 0 has the memory of the rules, and what was
    averaged so far depends on what had arrived at a rank by then.
    """
    current = upgrade(state)
    compared = {name: current[name] for name in ("version", "schedule", "cost")}
    return hash48(json.dumps(compared, sort_keys=True, default=str))
