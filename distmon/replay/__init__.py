"""Rules on recorded runs: what would have fired, and when. See docs/replay.md."""

from distmon.replay.backtest import Failure, Replay, run_rules
from distmon.replay.known_names import parse_map
from distmon.replay.logs import LogError
from distmon.replay.one_run import replay_run
from distmon.replay.settings import activate, load_rules
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
