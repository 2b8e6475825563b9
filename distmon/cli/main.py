"""Entry point of the `distmon` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distmon.errors import DistmonError

app = typer.Typer(
    name="distmon",
    help="Watches distributed PyTorch training from the inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor() -> None:
    """What works on this machine, what does not, and why."""
    from distmon.cli.doctor import print_findings

    print_findings(_console())


@app.command()
def rules(
    config: Annotated[
        Path | None, typer.Option(help="Show the thresholds as this YAML or JSON file sets them.")
    ] = None,
) -> None:
    """The table of rules with thresholds and advice."""
    from distmon.cli.rules import print_rules

    print_rules(_console(), config)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    last: Annotated[int, typer.Option(min=1, help="How many records to list.")] = 10,
) -> None:
    """Read a run folder back: its last records, its alerts, and whether every file is whole."""
    from distmon.cli.show import print_run

    print_run(_console(), run, last)


def _console() -> Console:
    """As wide as the terminal; wide enough for the tables when there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def run() -> None:
    """What the console script calls: a mistake is one sentence and exit code 2."""
    try:
        app()
    except DistmonError as error:
        print(f"distmon: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
