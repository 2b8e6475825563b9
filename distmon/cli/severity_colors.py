"""Colors of severities in tables of the command line."""

from __future__ import annotations

from typing import Final

SEVERITY_COLORS: Final = {"info": "cyan", "warning": "yellow", "critical": "red"}
