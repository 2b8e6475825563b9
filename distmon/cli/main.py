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


@app.command()
def verify(
    parallel: Annotated[
        str,
        typer.Option(
            help="Configurations by name, comma-separated; globs are allowed: 'ddp*,pp'. "
            "Default: all of them. --list shows the names."
        ),
    ] = "*",
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own model as module:factory, importable from here. factory() returns "
            "(model, batch) or (model, batch, loss); batch(step) is the global batch of a step, "
            "loss(output, batch) a mean over its rows."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many processes to start, at least 2.")] = 2,
    steps: Annotated[int, typer.Option(help="How long to train; every 2nd is observed.")] = 6,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the configurations and stop.")
    ] = False,
) -> None:
    """Is the record the same however the model is distributed?

    Trains a small model (or yours) unsharded in one process and distributed over gloo processes on
    this machine, from the same seed and data in float64, and compares every column that the monitor
    finds with the truth. A configuration that cannot run on so many ranks is skipped. Exit code 1
    when one is off, 2 for a mistake in the options.
    """
    from distmon.cli.verify import print_configurations, print_verification

    if show_list:
        print_configurations(_console())
    elif not print_verification(_console(), parallel, model, ranks, steps):
        raise typer.Exit(1)


@app.command()
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
            help="YAML or JSON: a monitor config, or its `rules` alone; else the defaults."
        ),
    ] = None,
    own_rules: Annotated[
        bool, typer.Option("--own-rules", help="Each run folder with the rules it was run with.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="rule.threshold=a,b,c: how often would it fire with each? Repeatable."),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="ours=theirs: a column of a log that is not ours, such as loss=my_loss."
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of a log that is not ours that make one observation."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="info, warning or critical: exit code 1 when an alert as bad or worse would have "
            "fired."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--format", help="What is printed: table or json.")
    ] = "table",
) -> None:
    """What would the rules have said of these recorded runs, and when?

    Exit code 0 whether or not something fired; 1 when one of several runs could not be read; 2 for
    a mistake, or when the only run could not be read.
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
    code = replay_runs(_console(), Console(stderr=True), options)
    if code:
        raise typer.Exit(code)


@app.command()
def bench(
    model: Annotated[
        str,
        typer.Option(
            help="Your own model as module:factory, importable from here. factory() returns a "
            "model, or (model, step) where step(model) makes a forward pass on a batch of its own "
            "and returns the loss."
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            help='For a model alone: the shape of a random batch, "8x128", or "8x128:50257" for '
            "integers below 50257. The loss is then the mean square of the output."
        ),
    ] = None,
    contenders: Annotated[
        str | None, typer.Option(help="Names, comma-separated. Default: all of them.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each takes its turn, at least 2.")] = 7,
    limit: Annotated[
        float,
        typer.Option(help="Seconds after which a slow contender takes no more turns, but 3."),
    ] = 15.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: runs/bench-MODEL.")
    ] = None,
) -> None:
    """What does watching cost on your own model, next to other ways to watch?

    Trains it here, while contenders take turns after real steps; each answer is checked first.
    Prints a table and writes numbers, pictures and a page. Exit code 1 when an answer of distmon
    was wrong, 2 for a mistake in the options.
    """
    from distmon.cli.bench import run_benchmark

    if not run_benchmark(_console(), model, batch, contenders, rounds, limit, out):
        raise typer.Exit(1)


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
