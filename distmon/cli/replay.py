"""`distmon replay`: evaluate rules on recorded runs, print one in detail or many in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from distmon.cli.replay_output import ReplayedRun, as_json, print_one, print_runs, print_sweep
from distmon.errors import ConfigError, DistmonError
from distmon.replay import (
    Recording,
    Source,
    Sweep,
    activate,
    find_sources,
    load_rules,
    parse_map,
    parse_sweep,
    read_source,
    run_rules,
    run_sweep,
)
from distmon.replay.backtest import SEVERITIES, at_least
from distmon.replay.settings import Settings

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class ReplayOptions:
    """Options of the command line."""

    paths: Sequence[Path]
    rules: Path | None = None
    own_rules: bool = False
    sweeps: Sequence[str] = ()
    maps: Sequence[str] = ()
    interval: int | None = None
    fail_on: str | None = None
    output: str = "table"


def replay_runs(console: Console, errors: Console, options: ReplayOptions) -> int:
    """Replay all runs, print the results, and return the exit code.

    A run that cannot be read is reported on `errors` and skipped; if it is the only one, its
    DistmonError is raised.
    """
    if options.rules is not None and options.own_rules:
        raise ConfigError("--rules and --own-rules cannot be combined")
    fail_on = None if options.fail_on is None else _one_of(options.fail_on, SEVERITIES, "--fail-on")
    output = _one_of(options.output, ("table", "json"), "--format")
    settings = load_rules(options.rules) if options.rules is not None else {}
    activate(settings)
    sweeps = [parse_sweep(text, settings) for text in options.sweeps]
    requested = parse_map(options.maps)

    problems: list[DistmonError] = []
    sources: list[Source] = []
    for path in options.paths:
        try:
            sources += find_sources(path)
        except DistmonError as error:
            problems.append(error)
    if requested and sources and all(source.kind == "run folder" for source in sources):
        raise ConfigError("--map applies to logs of other tools, but all runs are run folders")
    replayed: list[ReplayedRun] = []
    with _progress(errors) as progress:
        bar = progress.add_task("", total=len(sources))
        for done, source in enumerate(sources):

            def advance(share: float, done: int = done) -> None:
                progress.update(bar, completed=done + share)

            progress.update(bar, description=str(source.path), completed=done)
            try:
                for recording in read_source(source, requested, options.interval):
                    replayed.append(
                        _replay(recording, settings, options.own_rules, sweeps, advance)
                    )
            except DistmonError as error:
                problems.append(error)
    if len(problems) == 1 and not replayed:
        raise problems[0]
    if output == "json":
        text = as_json(replayed, sweeps, [str(problem) for problem in problems])
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif replayed:
        _print(console, replayed, sweeps, settings, alone=not problems)
    for problem in problems:
        errors.print(f"distmon: {problem}", markup=False, highlight=False, soft_wrap=True)
    alarmed = fail_on is not None and any(at_least(each.alerts, fail_on) for each in replayed)
    return 1 if problems or alarmed else 0


def _replay(
    recording: Recording,
    settings: Settings,
    own_rules: bool,
    sweeps: Sequence[Sweep],
    advance: Callable[[float], None],
) -> ReplayedRun:
    notes = [*recording.notes]
    if own_rules and recording.settings is None:
        notes.append("it has no rule settings: the defaults are used")
    elif own_rules and recording.settings is not None:
        settings = recording.settings
    try:
        active = activate(settings)
    except ConfigError as error:
        raise ConfigError(f"{recording.name}: {error}") from None
    replay = run_rules(recording.records, active, advance)
    points = tuple(tuple(run_sweep(recording.records, sweep, settings)) for sweep in sweeps)
    return ReplayedRun.of(recording, replay, points, tuple(notes))


def _print(
    console: Console,
    replayed: Sequence[ReplayedRun],
    sweeps: Sequence[Sweep],
    settings: Settings,
    alone: bool,
) -> None:
    if len(replayed) == 1 and alone and not sweeps:
        print_one(console, replayed[0])
        return
    print_runs(console, replayed)
    for i, sweep in enumerate(sweeps):
        print_sweep(console, sweep, [(each, each.sweeps[i]) for each in replayed], settings)


def _one_of(value: str, choices: Sequence[Choice], option: str) -> Choice:
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(f'{option} must be one of {", ".join(choices)}, not "{value}"')


def _progress(errors: Console) -> Progress:
    """Return a progress bar that is disabled unless stderr is a terminal."""
    return Progress(
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
