"""The results of a run as one HTML page that needs nothing else: pictures are inside.

python benchmarks/page.py runs/bench
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from distmon.errors import DistmonError
from distmon_benchmarks import wording
from distmon_benchmarks.goals import judge
from distmon_benchmarks.growth import AXES, cells, series
from distmon_benchmarks.plots import NoMatplotlibError, Picture, draw
from distmon_benchmarks.results import Case, Context
from distmon_benchmarks.summary import Summary, case_name, load
from distmon_benchmarks.table import LEGEND, absent, case_line, cost_rows, filled_columns

NAME: Final = "index.html"

STYLE: Final = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #222;
  background: #fff; margin: 0 auto; max-width: 1060px; padding: 0 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 1.6rem 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1.02rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; } .quiet { color: #5a5a5a; font-size: .9rem; }
code { background: #f3f4f6; padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem .28rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #eee; vertical-align: top; }
th { font-weight: 600; color: #5a5a5a; border-bottom: 1px solid #bbb; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
.words td, .words th { text-align: left; white-space: normal; min-width: 5.5rem; }
.words td:first-child { position: static; } .words td:last-child { white-space: nowrap; }
tr.own td { color: #0072B2; font-weight: 600; }
.reached, .missed, .open { font-weight: 600; }
.reached { color: #00664b; } .missed { color: #a63c00; } .open { color: #5a5a5a; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 1.2rem 2rem; align-items: start; }
figure { margin: .4rem 0; } figure img { width: 100%; max-width: 620px; height: auto; }
figcaption { color: #5a5a5a; font-size: .86rem; max-width: 620px; }
details { margin: .5rem 0; } summary { cursor: pointer; color: #0072B2; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .6rem 0;
  font-size: .92rem; } dt { color: #5a5a5a; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 .5rem; } }
"""


def write(folder: Path) -> Path:
    """Write `index.html` into the folder, and the pictures beside it.

    Without matplotlib there is a page without pictures. A `ResultsError` for bad results.
    """
    summary = load(folder)
    try:
        pictures, without = draw(folder), ""
    except NoMatplotlibError as error:
        pictures, without = [], str(error)
    path = folder / NAME
    path.write_text("\n".join(_page(summary, pictures, without)) + "\n", encoding="utf-8")
    return path


def _page(summary: Summary, pictures: Sequence[Picture], without: str) -> Iterator[str]:
    context = summary.context
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>What watching costs</title><style>{STYLE}</style></head><body>"
    yield "<h1>What watching a training costs</h1>"
    yield f"<p>Made by <code>{escape(context.command)}</code></p>"
    yield f'<p class="quiet">{escape(wording.conditions_line(context))}</p>'
    for warning in filter(None, (wording.doubt(context), without)):
        yield f'<p class="missed">{escape(warning)}</p>'
    headline = summary.headline
    assert headline is not None  # a folder without numbers is not loaded
    of_others = [p for p in pictures if p.case not in (None, headline)]
    growth = [p for p in pictures if p.case is None and p.title.startswith("Growth")]
    first = [p for p in pictures if p not in of_others and p not in growth]
    yield f"<h2>{escape(case_name(headline))}</h2>"
    yield f"<p>{escape(case_line(summary, headline))}.</p>"
    yield from _pictures(first)
    yield from _costs(summary, headline)
    yield f'<p class="quiet">{escape(LEGEND)}</p>'
    yield from _goals(summary)
    yield from _growth(summary, growth)
    yield from _others(summary, headline, {p.case: p for p in of_others})
    yield from _contenders(context)
    yield from _conditions(context)
    yield "</body></html>"


def _pictures(pictures: Sequence[Picture]) -> Iterator[str]:
    if pictures:
        yield '<div class="pictures">'
        for picture in pictures:
            data = base64.b64encode(picture.path.read_bytes()).decode()
            yield f'<figure><img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'
            yield f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        yield "</div>"


def _costs(summary: Summary, case: Case) -> Iterator[str]:
    columns = filled_columns(summary, case)
    rows = cost_rows(summary, case, columns)
    own = {row[0] for row in rows if row[0].startswith("distmon")}
    yield from _table(["", *columns], rows, own)


def _goals(summary: Summary) -> Iterator[str]:
    judged = judge(summary)
    if not judged:
        return
    yield "<h2>Goals</h2>"
    yield "<p>Medians are judged; the ranges are 95% intervals of a bootstrap over rounds.</p>"
    yield '<div class="wide"><table class="words">'
    yield "<tr><th>goal</th><th>limit</th><th>measured</th><th></th></tr>"
    for each in judged:
        kind = "open" if each.verdict == "not measured" else each.verdict
        texts = "".join(f"<td>{escape(t)}</td>" for t in (each.goal, each.limit, each.measured))
        yield f'<tr>{texts}<td class="{kind}">{each.verdict}</td></tr>'
    yield "</table></div>"


def _growth(summary: Summary, pictures: Sequence[Picture]) -> Iterator[str]:
    lines = [line for axis in AXES for line in series(summary, axis)]
    if not lines:
        return
    yield "<h2>Growth</h2>"
    yield from _pictures(pictures)
    yield "<details><summary>all slopes</summary>"
    headings = ["along", "contender", "from", "to", "slope", "per tensor", "on"]
    yield from _table(headings, [cells(line) for line in lines])
    yield "</details>"


def _others(
    summary: Summary, headline: Case, pictures: Mapping[Case | None, Picture]
) -> Iterator[str]:
    others = [case for case in summary.cases if case != headline and summary.costs(case)]
    if others:
        yield "<h2>Other workloads</h2>"
    for case in others:
        line = f"{case_name(case)}: {case_line(summary, case)}"
        yield f"<details><summary>{escape(line)}</summary>"
        yield from _pictures([pictures[case]] if case in pictures else [])
        yield from _costs(summary, case)
        yield "</details>"


def _contenders(context: Context) -> Iterator[str]:
    if context.descriptions:
        yield "<h2>Contenders</h2>"
        yield from _terms(context.descriptions.items())
    missing = absent(context)
    if missing:
        yield "<h2>Without numbers</h2>"
        yield from _terms(missing)


def _conditions(context: Context) -> Iterator[str]:
    yield "<h2>Conditions</h2>"
    commit = f"{context.commit or 'unknown'}{' with changes' if context.dirty else ''}"
    yield from _terms(
        [
            ("command", context.command),
            ("begun", context.date),
            ("device", context.device),
            ("processor", f"{context.cpu}, {context.cores} cores, {context.threads} threads"),
            ("load", f"{context.load_before:.2f} before, {context.load_after:.2f} after"),
            ("commit", commit),
            ("versions", ", ".join(f"{k} {v}" for k, v in context.versions.items())),
            *context.conditions.items(),
        ]
    )


def _terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "<dl>"
    for term, text in pairs:
        yield f"<dt>{escape(term)}</dt><dd>{escape(str(text))}</dd>"
    yield "</dl>"


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], own: Iterable[str] = ()
) -> Iterator[str]:
    yield '<div class="wide"><table><tr>'
    yield "".join(f"<th>{escape(heading)}</th>" for heading in headings) + "</tr>"
    for row in rows:
        kind = ' class="own"' if row[0] in own else ""
        yield f"<tr{kind}>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>"
    yield "</table></div>"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results of overhead.py or distmon bench")
    try:
        print(write(parser.parse_args().folder))
    except DistmonError as error:
        print(f"page.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
