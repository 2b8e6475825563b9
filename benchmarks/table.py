"""The results of a run as tables: on the console, and in the README between two markers.

    python benchmarks/table.py runs/bench [--readme README.md [--check]]

With --readme the text between `<!-- bench:begin -->` and `<!-- bench:end -->` is written anew and
nothing else; with --check nothing is written, and exit code 1 says that it does not agree.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distmon.errors import DistmonError
from distmon_benchmarks import wording
from distmon_benchmarks.goals import judge
from distmon_benchmarks.growth import growth_table
from distmon_benchmarks.results import Case, Context, ResultsError
from distmon_benchmarks.summary import Cost, Summary, case_name, load

BEGIN: Final = "<!-- bench:begin -->"
END: Final = "<!-- bench:end -->"

Cell = Callable[[Cost], str]
"""What a column says of a contender; empty for what was not measured."""


def _seconds(percentile: str) -> Cell:
    return lambda cost: wording.seconds(getattr(cost.observation, percentile))


def _ratio(cost: Cost) -> str:
    return "" if cost.over_sampled is None else wording.times(cost.over_sampled)


def _share(interval: int) -> Cell:
    def cell(cost: Cost) -> str:
        share = cost.share(interval)
        return "" if share is None else wording.share(share)

    return cell


def _memory(cost: Cost) -> str:
    return "" if cost.memory is None else wording.size(cost.memory)


def _background(cost: Cost) -> str:
    return wording.seconds(cost.counts["background"]) if "background" in cost.counts else ""


def _count(measure: str) -> Cell:
    return lambda cost: f"{cost.counts[measure]:.0f}" if measure in cost.counts else ""


def _bytes(measure: str) -> Cell:
    return lambda cost: wording.size(cost.counts[measure]) if measure in cost.counts else ""


COLUMNS: Final[Mapping[str, Cell]] = {
    "p20": _seconds("p20"),
    "p50": _seconds("p50"),
    "p80": _seconds("p80"),
    "/ sampled": _ratio,
    "beside": _background,
    "share at 1": _share(1),
    "at 10": _share(10),
    "at 100": _share(100),
    "memory": _memory,
    "tags": _count("tags"),
    "log": _bytes("log_bytes"),
    "syncs": _count("host_syncs"),
    "launches": _count("launches"),
    "coll.": _count("collectives"),
    "sent": _bytes("sent_bytes"),
}
"""Heading and content, for the console and the page."""
LEGEND: Final = (
    "p20, p50, p80: time added to one observed step, over rounds. / sampled: median over that of "
    "distmon sampled, in the rounds that both took part in. beside: CPU time in threads and "
    "processes of its own. share: of the training time when one step in 1, 10, 100 is observed. "
    "memory: most that it had beyond what training had. tags, log, host synchronisations, "
    "launches, collectives and bytes sent: per observation."
)
IN_README: Final = {
    "one observation (p50)": "p50",
    "times distmon sampled": "/ sampled",
    "CPU time beside the training thread": "beside",
    "share of training at 1": "share at 1",
    "at 100": "at 100",
    "extra memory": "memory",
    "tags": "tags",
}
"""Heading there, and which column it is."""


def cost_rows(summary: Summary, case: Case, columns: Sequence[str]) -> list[list[str]]:
    """For each contender its name and these columns."""
    return [
        [cost.contender, *(COLUMNS[column](cost) for column in columns)]
        for cost in summary.costs(case)
    ]


def filled_columns(summary: Summary, case: Case) -> list[str]:
    """The columns that say something of anybody."""
    rows = cost_rows(summary, case, [*COLUMNS])
    return [name for i, name in enumerate(COLUMNS, 1) if any(row[i] for row in rows)]


def case_line(summary: Summary, case: Case) -> str:
    """What was trained and how long a bare step took."""
    costs = summary.costs(case)
    rounds = max((cost.observation.rounds for cost in costs), default=0)
    step = costs[0].step if costs else None
    parts = [
        f"{case.tensors} tensors with {wording.count(case.elements)} elements",
        f"bare training step {wording.seconds(step)}" if step is not None else "",
        f"{rounds} rounds",
    ]
    return ", ".join(filter(None, parts))


def absent(context: Context) -> list[tuple[str, str]]:
    """Who has no numbers, and why."""
    return [
        *((name, f"no speed for a wrong answer: {what}") for name, what in context.wrong.items()),
        *((name, f"skipped: {reason}") for name, reason in context.skipped.items()),
        *((name, f"skipped: {reason}") for name, reason in context.skipped_workloads.items()),
    ]


def show(folder: Path, console: Console | None = None) -> None:
    """Print everything; a `ResultsError` when the folder cannot be read."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=150))
    summary = load(folder)
    for case in summary.cases:
        if summary.costs(case):
            console.print(_console_table(summary, case))
    console.print(LEGEND, style="dim", highlight=False)
    growth = growth_table(summary)
    if growth is not None:
        console.print(growth)
    goals = judge(summary)
    if goals:
        table = Table(title="goals", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("goal", "limit", "measured", ""):
            table.add_column(heading)
        colours = {"reached": "green", "missed": "red", "not measured": "yellow"}
        for goal in goals:
            verdict = f"[{colours[goal.verdict]}]{goal.verdict}[/]"
            table.add_row(goal.goal, goal.limit, goal.measured, verdict)
        console.print(table)
    for name, reason in absent(summary.context):
        console.print(f"[yellow]{escape(name)}[/]: {escape(reason)}", highlight=False)
    console.print(escape(wording.conditions_line(summary.context)), highlight=False)
    if doubt := wording.doubt(summary.context):
        console.print(doubt, style="red", highlight=False)


def _console_table(summary: Summary, case: Case) -> Table:
    table = Table(
        title=f"{case_name(case)}: {case_line(summary, case)}", box=box.SIMPLE_HEAD, pad_edge=False
    )
    columns = filled_columns(summary, case)
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *row in cost_rows(summary, case, columns):
        table.add_row(f"[bold]{escape(name)}[/]" if name.startswith("distmon") else name, *row)
    return table


def readme_block(summary: Summary, folder: Path) -> str:
    """What stands between the markers, in Markdown."""
    return "\n".join([BEGIN, *_readme_lines(summary, folder), END])


def _readme_lines(summary: Summary, folder: Path) -> Iterator[str]:
    context = summary.context
    yield (
        f"Measured by `{context.command}`, written here by "
        f"`python benchmarks/table.py {folder.as_posix()} --readme README.md`."
    )
    yield f"{wording.conditions_line(context)}."
    if doubt := wording.doubt(context):
        yield f"**Warning:** {doubt}."
    case = summary.headline
    assert case is not None  # a folder without numbers is not loaded
    yield ""
    yield f"{case_name(case)}: {case_line(summary, case)}."
    yield ""
    yield from _markdown(["", *IN_README], cost_rows(summary, case, [*IN_README.values()]), "r")
    goals = judge(summary)
    if goals:
        yield ""
        rows = [[goal.goal, goal.limit, goal.measured, goal.verdict] for goal in goals]
        yield from _markdown(["goal", "limit", "measured", ""], rows, "l")
    missing = absent(context)
    if missing:
        yield ""
        yield from (f"- {_cell(name)}: {_cell(reason)}" for name, reason in missing)


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|---{('|---:' if align == 'r' else '|---') * (len(headings) - 1)}|"
    for row in rows:
        yield f"| {' | '.join(_cell(text) for text in row)} |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|").replace("<", "&lt;"))


def with_block(text: str, block: str, name: str) -> str:
    """`text` with `block` between its markers; a `ResultsError` when they are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ResultsError(f"{name} must hold {BEGIN} and, after it, {END} exactly once")
    before, rest = text.split(BEGIN)
    newline = "\r\n" if "\r\n" in text else "\n"
    return before + block.replace("\n", newline) + rest.split(END)[1]


def update_readme(summary: Summary, folder: Path, readme: Path, check: bool) -> bool:
    """Write the block, or with `check` only say whether it agrees."""
    try:
        text = readme.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ResultsError(f"cannot read {readme}: {reason}") from None
    wanted = with_block(text, readme_block(summary, folder), str(readme))
    if not check:
        readme.write_bytes(wanted.encode())
    return wanted == text


def main(arguments: Sequence[str] | None = None) -> int:
    """Give the exit code: 1 when --check finds a difference, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="table.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="results of overhead.py or distmon bench")
    parser.add_argument("--readme", type=Path, help="a file with the markers, to be written")
    parser.add_argument("--check", action="store_true", help="only say whether the file agrees")
    options = parser.parse_args(arguments)
    try:
        if options.readme is None:
            if options.check:
                raise ResultsError("--check needs --readme")
            show(options.folder)
            return 0
        agrees = update_readme(load(options.folder), options.folder, options.readme, options.check)
    except DistmonError as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 2
    if options.check and not agrees:
        print(f"table.py: {options.readme} does not agree with {options.folder}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
