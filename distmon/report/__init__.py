"""Views of runs for people: report, live page, comparison. See docs/report.md."""

from distmon.report.view import build_view
from distmon.report.write_report import write_report

__all__ = ["build_view", "write_report"]
