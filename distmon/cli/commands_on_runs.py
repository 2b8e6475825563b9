"""The commands that read recorded runs. What a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distmon.cli.command_console import command_console
from distmon.untrusted.terminal import terminal

ColumnNames = Annotated[
    list[str] | None,
    typer.Option(
        "--map", help="metric=column: a column of another tool's log, such as loss=my_loss."
    ),
]


def show(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder of them.")],
    last: Annotated[int, typer.Option(min=1, help="How many records to list.")] = 10,
) -> None:
    """Print the last records and the alerts of a run folder, and which entries are damaged.

    Of a folder of run folders, print one line for each run.
    """
    from distmon.cli.show import print_run

    print_run(command_console(), run, last)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file. Default: RUN/report.html.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob of parameters that must have their percentiles in the report. Repeatable. "
            "In a model of up to 250 parameters all have them."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML file with plots of the run. It needs no network.

    Long histories are binned: the file stays below 12 MB for any number of parameters and steps.
    """
    from distmon.report import write_report

    path = write_report(run, output, params=param or ())
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def watch(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that is going on.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
) -> None:
    """Show a run in the terminal while it goes on: losses, updates, ranks, alerts. Ctrl-C ends it.

    It reads what is new in the folder, and continues when the run is resumed.
    """
    from distmon.cli.watch import watch as watch_run

    watch_run(terminal(), run, every, once)


def serve(
    runs_dir: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    address: Annotated[
        str, typer.Option(help="Where to listen. Another than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free one.")] = 8471,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="DISTMON_SERVE_TOKEN",
            help="At least 16 characters; better in the environment, where others do not see it.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser while they go on. Read-only."""
    from distmon.cli.serve import serve as serve_runs

    serve_runs(command_console(), runs_dir, address, port, token or None)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="The first run and those to compare with it: run folders, folders of them, "
            "TensorBoard folders, CSV files, or wandb exports (CSV or JSON lines)."
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            help="Compare at equal steps or tokens. Default: tokens where the runs differ in "
            "tokens per step, else steps."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write this self-contained page with plots.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="'final_loss > 1%': exit code 1 if the quantity changed by more than that, and "
            "by more than noise. Repeatable."
        ),
    ] = None,
    map_: ColumnNames = None,
) -> None:
    """Compare runs with the first one: what differs, what is better or worse, and where.

    A verdict is about the last fifth of what both runs have. Exit code 1 with --fail-if, 2 for bad
    options.
    """
    from distmon.cli.compare import CompareOptions
    from distmon.cli.compare import compare as run_comparison

    options = CompareOptions(runs, by, html, json, fail_if or (), map_ or ())
    if code := run_comparison(command_console(), options):
        raise typer.Exit(code)


def replay(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, folders of them, TensorBoard folders, CSV files, or wandb exports "
            "(CSV or JSON lines)."
        ),
    ],
    rules: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON: a monitor config, or its `rules` alone. Default: built-in settings."
        ),
    ] = None,
    own_rules: Annotated[
        bool, typer.Option("--own-rules", help="Use the rule settings stored in each run folder.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="rule.threshold=a,b,c: count the alerts for each value. Repeatable."),
    ] = None,
    map_: ColumnNames = None,
    interval: Annotated[
        int | None,
        typer.Option(min=1, help="Steps per observation in another tool's log."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="info, warning or critical: exit code 1 if an alert of this severity or a higher "
            "one would have been raised."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--format", help="Output format: table or json.")
    ] = "table",
) -> None:
    """Evaluate rules on recorded runs and print the alerts that they would have raised.

    Exit code 0 with or without alerts; 1 with --fail-on, or when one of several runs could not be
    read; 2 for bad options, or when the only run could not be read.
    """
    from distmon.cli.replay import ReplayOptions, replay_runs

    options = ReplayOptions(
        paths=runs,
        rules=rules,
        own_rules=own_rules,
        sweeps=sweep or (),
        maps=map_ or (),
        interval=interval,
        fail_on=fail_on,
        output=output,
    )
    code = replay_runs(command_console(), terminal(stderr=True), options)
    if code:
        raise typer.Exit(code)
