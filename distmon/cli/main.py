"""Entry point of the `distmon` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from distmon.cli import commands_on_runs, commands_on_training
from distmon.cli.command_console import command_console
from distmon.errors import DistmonError
from distmon.untrusted.terminal import printable

app = typer.Typer(
    name="distmon",
    help="Monitors distributed PyTorch training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"distmon {version('distmon')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Monitors distributed PyTorch training."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print which features work on this machine, which do not, and why."""
    from distmon.cli.doctor import findings_as_json, print_findings

    if as_json:
        typer.echo(findings_as_json())
    else:
        print_findings(command_console())


def rules(
    name: Annotated[str | None, typer.Argument(help="Only this rule, with details.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Print the thresholds of this YAML or JSON config file.")
    ] = None,
) -> None:
    """Print the rules with thresholds and advice."""
    from distmon.cli.rules import print_rules

    print_rules(command_console(), config, name)


def metrics() -> None:
    """Print every metric with its unit, reduction and meaning, as Markdown."""
    from distmon.cli.metrics_page import page

    typer.echo(page(), nl=False)


# In the order of `distmon --help`.
app.command()(doctor)
app.command()(rules)
app.command()(commands_on_runs.show)
app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[TORCHRUN OPTIONS] [--distmon.KEY VALUE]",
)(commands_on_training.run_script)
app.command()(commands_on_runs.report)
app.command()(commands_on_runs.watch)
app.command()(commands_on_runs.serve)
app.command()(commands_on_runs.compare)
app.command()(metrics)
app.command()(commands_on_training.coordcheck)
app.command()(commands_on_training.verify)
app.command()(commands_on_runs.replay)
app.command()(commands_on_training.bench)


def run() -> None:
    """Run the console script; a DistmonError prints one sentence and exits with code 2."""
    try:
        app()
    except DistmonError as error:
        print(f"distmon: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
