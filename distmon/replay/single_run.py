"""`replay_run`: replay one recorded run with one set of rules from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distmon.replay.backtest import Replay, run_rules
from distmon.replay.column_names import parse_map
from distmon.replay.logs import LogError
from distmon.replay.settings import activate, as_settings, load_rules
from distmon.replay.sources import find_sources, read_source
from distmon.rules.base import Rule


def replay_run(
    path: str | os.PathLike[str],
    rules: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    own_rules: Sequence[Rule] = (),
    columns: Mapping[str, str] | None = None,
    interval: int | None = None,
) -> Replay:
    """Evaluate rules on the recorded run at `path` and return the alerts.

    `rules` are settings by rule name, or a file of them; None for the defaults. `own_rules` are
    functions decorated with `distmon.rule`. `columns` maps distmon's metrics to the columns of
    another tool's log, and `interval` is the number of steps per observation in such a log.

    Raises LogError when `path` holds no run, or several.
    """
    if rules is None or isinstance(rules, Mapping):
        settings = as_settings(rules or {})
    else:
        settings = load_rules(Path(rules))
    active = activate(settings, own_rules)
    requested = parse_map([f"{metric}={column}" for metric, column in (columns or {}).items()])
    sources = find_sources(Path(path))
    recordings = [each for source in sources for each in read_source(source, requested, interval)]
    if len(recordings) > 1:
        raise LogError(f"{path} holds {len(recordings)} runs; pass the path of one of them")
    return run_rules(recordings[0].records, active)
