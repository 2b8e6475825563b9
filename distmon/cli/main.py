"""Entry point of the `distmon` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from distmon.errors import DistmonError
from distmon.untrusted.terminal import SafeConsole, printable, terminal

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


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print which features work on this machine, which do not, and why."""
    from distmon.cli.doctor import findings_as_json, print_findings

    if as_json:
        typer.echo(findings_as_json())
    else:
        print_findings(_console())


@app.command()
def rules(
    name: Annotated[str | None, typer.Argument(help="Only this rule, with details.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Print the thresholds of this YAML or JSON config file.")
    ] = None,
) -> None:
    """Print the rules with thresholds and advice."""
    from distmon.cli.rules import print_rules

    print_rules(_console(), config, name)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder of them.")],
    last: Annotated[int, typer.Option(min=1, help="How many records to list.")] = 10,
) -> None:
    """Print the last records and the alerts of a run folder, and which entries are damaged.

    Of a folder of run folders, print one line for each run.
    """
    from distmon.cli.show import print_run

    print_run(_console(), run, last)


@app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[TORCHRUN OPTIONS] [--distmon.KEY VALUE]",
)
def run_script(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="Or -m MODULE [ARGUMENTS]."),
    ],
) -> None:
    """Monitor an unmodified training script, in one process or in those of torchrun.

    Without an option of torchrun the script runs as `python SCRIPT` would. The monitor prints to
    the standard error. Settings: --distmon.interval 50, --distmon.config FILE, or the environment.
    """
    from distmon.integrations.launcher.command import run

    run(command)


@app.command()
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


@app.command()
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


@app.command()
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

    serve_runs(_console(), runs_dir, address, port, token or None)


@app.command()
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
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="metric=column: a column of another tool's log, such as loss=my_loss."
        ),
    ] = None,
) -> None:
    """Compare runs with the first one: what differs, what is better or worse, and where.

    A verdict is about the last fifth of what both runs have. Exit code 1 with --fail-if, 2 for bad
    options.
    """
    from distmon.cli.compare import CompareOptions
    from distmon.cli.compare import compare as run_comparison

    options = CompareOptions(runs, by, html, json, fail_if or (), map_ or ())
    if code := run_comparison(_console(), options):
        raise typer.Exit(code)


@app.command()
def metrics() -> None:
    """Print every metric with its unit, reduction and meaning, as Markdown."""
    from distmon.metrics import page

    typer.echo(page(), nl=False)


@app.command()
def coordcheck(
    model: Annotated[
        str,
        typer.Option(
            help="module:factory, importable from here, or `standard` or `mup` for the built-in "
            "GPT. factory(width) returns (model, batch), (model, batch, loss) or (model, batch, "
            "loss, optimizer); batch(step) is the batch of a step."
        ),
    ],
    widths: Annotated[str, typer.Option(help="At least 3 widths.")] = "128,256,512,1024",
    steps: Annotated[int, typer.Option(help="Training steps at each width.")] = 4,
    seeds: Annotated[int, typer.Option(help="Runs at each width.")] = 2,
    lr: Annotated[
        float, typer.Option(help="Learning rate of Adam, where factory() returns no optimizer.")
    ] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path(
        "runs/coordcheck"
    ),
    plot: Annotated[bool, typer.Option(help="Write coordcheck.png.")] = True,
) -> None:
    """Check that activations and logits keep their size as the model gets wider (muP).

    Trains each width for a few steps, and fits how far the output of each module has moved against
    the width. Exit code 1 when a module grows or shrinks with width, 2 for bad options.
    """
    from distmon.cli.coordcheck import run_coordcheck

    if not run_coordcheck(_console(), model, widths, steps, seeds, lr, out, plot):
        raise typer.Exit(1)


@app.command()
def verify(
    parallel: Annotated[
        str,
        typer.Option(
            help="Configurations by name, comma-separated; globs are allowed: 'tp*,pp'. "
            "Default: all of them. --list prints the names."
        ),
    ] = "*",
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own model as module:factory, importable from here. factory() returns "
            "(model, batch) or (model, batch, loss); batch(step) is the global batch of a step, "
            "loss(output, batch) a mean over its examples."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of processes, at least 2.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps; every 2nd is observed.")] = 6,
    sample_size: Annotated[
        str,
        typer.Option(
            help="What the monitor reads: sampled, auto (all gradients) or exact (all weights too)."
        ),
    ] = "sampled",
    show_list: Annotated[
        bool, typer.Option("--list", help="List the configurations and exit.")
    ] = False,
) -> None:
    """Check that the monitor records the same statistics under every parallelism.

    Trains a small model (or yours) unsharded in one process and distributed over gloo processes on
    this machine, from the same seed and data in float64, and compares every column of the records
    with the unsharded reference. A configuration that cannot run on this number of ranks is
    skipped. Exit code 1 when one is off, 2 for bad options.
    """
    from distmon.cli.verify import print_configurations, print_verification

    if show_list:
        print_configurations(_console())
    elif not print_verification(_console(), parallel, model, ranks, steps, sample_size):
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
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="metric=column: a column of another tool's log, such as loss=my_loss."
        ),
    ] = None,
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
    code = replay_runs(_console(), terminal(stderr=True), options)
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
    rounds: Annotated[int, typer.Option(help="How often each contender is timed, at least 2.")] = 7,
    limit: Annotated[
        float,
        typer.Option(help="Seconds after which a slow contender stops, after 3 rounds."),
    ] = 15.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: runs/bench-MODEL.")
    ] = None,
) -> None:
    """Measure what monitoring costs on your own model, next to what plain torch offers.

    Trains it here, while contenders take turns on real steps; the answer of each is checked. Prints
    a table and writes results.csv, summary.md and a plot. Exit code 1 when an answer of distmon was
    wrong, 2 for a mistake in the options.
    """
    from distmon.cli.bench import run_benchmark

    if not run_benchmark(_console(), model, batch, contenders, rounds, limit, out):
        raise typer.Exit(1)


def _console() -> SafeConsole:
    """Return a console as wide as the terminal; 140 columns when there is none."""
    console = terminal()
    return console if console.is_terminal else terminal(width=140)


def run() -> None:
    """Run the console script; a DistmonError prints one sentence and exits with code 2."""
    try:
        app()
    except DistmonError as error:
        print(f"distmon: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
