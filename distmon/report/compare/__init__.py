"""Compare runs: what differs, which metrics are better or worse, where. See docs/compare.md."""

from distmon.report.compare.compared_run import ComparedRun, load_runs
from distmon.report.compare.comparison import Comparison, compare_runs
from distmon.report.compare.conditions import Condition, parse_condition

__all__ = [
    "ComparedRun",
    "Comparison",
    "Condition",
    "compare_runs",
    "load_runs",
    "parse_condition",
]
