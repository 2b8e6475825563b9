"""The commands that train a model. What a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distmon.cli.command_console import command_console


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

    if not run_coordcheck(command_console(), model, widths, steps, seeds, lr, out, plot):
        raise typer.Exit(1)


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
        print_configurations(command_console())
    elif not print_verification(command_console(), parallel, model, ranks, steps, sample_size):
        raise typer.Exit(1)


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

    if not run_benchmark(command_console(), model, batch, contenders, rounds, limit, out):
        raise typer.Exit(1)
