"""`distmon report`: one self-contained HTML file of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distmon.errors import RunFolderError
from distmon.report.html_page import self_contained
from distmon.report.view import build_view
from distmon.runs.reader import RunTail

REPORT_FILE = "report.html"


def write_report(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    params: Sequence[str] = (),
) -> Path:
    """Write the report of a run folder and return its path, by default `report.html` in the folder.

    `params` are globs of parameters that must have their percentiles in it.
    """
    folder = Path(run)
    target = folder / REPORT_FILE if output is None else Path(output)
    view = build_view(folder.resolve().name, RunTail(folder).read(), globs=params)
    page = self_contained(view, ["start_report.js"])
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        staged.write_text(page, encoding="utf-8")
        os.replace(staged, target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None
    return target
