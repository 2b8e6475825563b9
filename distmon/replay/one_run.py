"""One recorded run and one set of rules: the library's way in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distmon.replay.backtest import Replay, run_rules
from distmon.replay.known_names import parse_map
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
    """What rules would have said of the one recorded run at `path`.

    `rules` are settings by rule name, or a file of them; distmon's defaults without. `own_rules`
    are functions decorated with `distmon.rule`. `columns` maps our metrics to the columns of
    somebody else's log, of which `interval` steps make one observation.
    """
    if rules is None or isinstance(rules, Mapping):
        settings = as_settings(rules or {})
    else:
        settings = load_rules(Path(rules))
    active = activate(settings, own_rules)
    asked = parse_map([f"{ours}={theirs}" for ours, theirs in (columns or {}).items()])
    sources = find_sources(Path(path))
    recordings = [each for source in sources for each in read_source(source, asked, interval)]
    if len(recordings) > 1:
        raise LogError(f"{path} holds {len(recordings)} runs; give one of them")
    return run_rules(recordings[0].records, active)
