"""Evaluate rules on recorded runs: which alerts they would have raised. See docs/replay.md."""

from distmon.replay.backtest import Failure, Replay, run_rules
from distmon.replay.column_names import parse_map
from distmon.replay.logs import LogError
from distmon.replay.settings import activate, load_rules
from distmon.replay.single_run import replay_run
from distmon.replay.sources import Recording, Source, find_sources, read_source
from distmon.replay.sweep import Sweep, SweepPoint, parse_sweep, run_sweep

__all__ = [
    "Failure",
    "LogError",
    "Recording",
    "Replay",
    "Source",
    "Sweep",
    "SweepPoint",
    "activate",
    "find_sources",
    "load_rules",
    "parse_map",
    "parse_sweep",
    "read_source",
    "replay_run",
    "run_rules",
    "run_sweep",
]
