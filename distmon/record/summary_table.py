"""Rows of names and values, shown by rich in a terminal and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.table import Table
from rich.text import Text

Rows = Sequence[tuple[str, str]]


def rich_table(title: str, rows: Rows) -> Table:
    """Return the rows as a table for rich."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def html_table(title: str, rows: Rows) -> str:
    """Return the rows as an HTML table; names and values are text."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"
