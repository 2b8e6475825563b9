"""`distmon bench`: what monitoring costs on the user's own model, next to plain torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from distmon.bench.contender import Contender, find
from distmon.bench.contenders import BUILT_IN, NONE
from distmon.bench.interleaved import Rounds
from distmon.bench.machine import this_machine
from distmon.bench.measuring import measure
from distmon.bench.plot import NoMatplotlibError, draw_costs
from distmon.bench.report import write_summary
from distmon.bench.results import ResultsWriter, read
from distmon.bench.user_model import user_workload
from distmon.errors import ConfigError


def run_benchmark(
    console: Console,
    model: str,
    batch: str | None,
    contenders: str | None,
    rounds: int,
    limit: float,
    out: Path | None,
) -> bool:
    """Measure, write and print; return False when an answer of distmon was wrong."""
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError("distmon bench needs psutil: pip install 'distmon[bench]'")
    if rounds < 2:
        raise ConfigError(f"--rounds must be at least 2, not {rounds}")
    if not limit > 0:
        raise ConfigError(f"--limit must be above 0 seconds, not {limit:g}")
    chosen = choose(contenders, BUILT_IN)
    workload, dtype = user_workload(model, batch)
    folder = out or Path("runs") / f"bench-{re.sub(r'[^A-Za-z0-9_]+', '-', model)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --out {folder}: {error.strerror}") from None
    with (
        console.status(f"measuring {model}") as status,
        ResultsWriter(folder, this_machine()) as writer,
    ):
        measure(workload, dtype, chosen, writer, Rounds(rounds, limit), advance=status.update)
    results = read(folder)
    write_summary(results, folder, console)
    try:
        draw_costs(results, results.cases[0], folder)
    except NoMatplotlibError as error:
        console.print(str(error), markup=False)
    console.print(f"written to {folder}", markup=False, highlight=False)
    return not any(name.startswith("distmon") for _, name in results.wrong_answers)


def choose(names: str | None, contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders of comma-separated names, all without names; `none` is always one."""
    if names is None:
        return [*contenders]
    wanted = [part.strip() for part in names.split(",") if part.strip()]
    try:
        if wanted:  # the bare step is what all are compared with
            return find([*wanted, NONE.name], contenders)
        unknown = ""
    except KeyError as error:
        unknown = error.args[0]
    known = ", ".join(contender.name for contender in contenders)
    raise ConfigError(f'--contenders must be of {known}, not "{unknown}"')
