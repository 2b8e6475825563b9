"""The command line of `python -m benchmarks.overhead`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from benchmarks import overhead
from benchmarks.contenders import CONTENDERS
from benchmarks.overhead.plan import Plan, run
from benchmarks.overhead.workloads import WORKLOADS, find_workloads
from benchmarks.plot import draw
from benchmarks.scale import ranks
from benchmarks.summary import summarize, wide_console
from distmon.bench.contender import NONE, find
from distmon.bench.plot import NoMatplotlibError
from distmon.bench.training import DTYPES, Dtype, Workload
from distmon.bench.user_model import user_workload
from distmon.errors import DistmonError

QUICK: Final[tuple[tuple[str, Dtype], ...]] = (
    ("gpt2", "fp32"),
    *((w.name, "fp32") for w in WORKLOADS if w.growth and w.name not in ("huge", "moe")),
    ("tensors-1000", "bf16"),
)
"""What a quick run trains. bf16 is slow on most CPUs, so only a small model is in it."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=(overhead.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under 10 minutes; the default")
    size.add_argument("--full", action="store_true", help="all workloads in fp32 and bf16, 4 ranks")
    parser.add_argument("--workloads", help="comma-separated; default: those of the size")
    parser.add_argument("--model", help="your own model as module:factory, as in distmon bench")
    parser.add_argument("--batch", help="for --model: the shape of a random batch, such as 8x128")
    parser.add_argument("--contenders", help="comma-separated; default: all")
    parser.add_argument("--dtypes", help="fp32,bf16")
    parser.add_argument("--ranks", help="comma-separated numbers, 0 for no ranks")
    parser.add_argument("--rounds", type=int, help="default: 5, or 15 with --full")
    parser.add_argument("--limit", type=float, help="seconds per contender; 8, or 120 with --full")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args(arguments)


def read_plan(options: argparse.Namespace) -> Plan:
    """Return the plan; exits with code 2 and one sentence when an option is wrong."""
    full: bool = options.full
    try:
        names = _split(options.contenders) or [c.name for c in CONTENDERS]
        contenders = find({*names, NONE.name}, CONTENDERS)
    except KeyError as error:
        _refuse(f"there is no contender {error.args[0]}", [c.name for c in CONTENDERS])
    rounds = options.rounds if options.rounds is not None else 15 if full else 5
    if rounds < 2:
        _refuse(f"--rounds must be at least 2, not {rounds}")
    alone = options.workloads or options.contenders or options.model
    numbers = _split(options.ranks or ("0" if alone else "1,2,4" if full else "1,2"))
    if not all(each.isdigit() for each in numbers):
        _refuse(f"--ranks must be comma-separated numbers, not {options.ranks}")
    return Plan(
        _cases(options),
        contenders,
        rounds,
        options.limit if options.limit is not None else 120.0 if full else 8.0,
        [int(each) for each in numbers if int(each) > 0],
        [*ranks.PARALLEL] if full or options.ranks else ["ddp"],
        full,
    )


def _cases(options: argparse.Namespace) -> list[tuple[Workload, Dtype]]:
    if options.model:
        try:
            return [user_workload(options.model, options.batch)]
        except DistmonError as error:
            _refuse(str(error))
    dtypes = _split(options.dtypes)
    if unknown := set(dtypes) - set(DTYPES):
        _refuse(f"there is no dtype {', '.join(sorted(unknown))}", [*DTYPES])
    try:
        workloads = find_workloads(_split(options.workloads) or [w.name for w in WORKLOADS])
    except KeyError as error:
        _refuse(f"there is no workload {error.args[0]}", [w.name for w in WORKLOADS])
    return [
        (workload, dtype)
        for workload in workloads
        for dtype in DTYPES
        if (dtype in dtypes if dtypes else dtype == "fp32" or options.full or not options.workloads)
        and (options.full or options.workloads or (workload.name, dtype) in QUICK)
    ]


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _refuse(sentence: str, valid: Sequence[str] = ()) -> NoReturn:
    listed = f"; there are {', '.join(valid)}" if valid else ""
    print(f"benchmarks.overhead: {sentence}{listed}", file=sys.stderr)
    sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the summary and draw."""
    options = parse(arguments)
    console = wide_console()
    run(read_plan(options), options.out, console)
    summarize(options.out, console)
    try:
        draw(options.out)
    except NoMatplotlibError as error:
        console.print(str(error), markup=False)
    console.print(f"written to {options.out}", highlight=False)
