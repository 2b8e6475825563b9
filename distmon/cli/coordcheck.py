"""`distmon coordcheck`: does the size of activations depend on the width of the model?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.coordcheck.built_in import BUILT_IN
from distmon.coordcheck.measuring import measure
from distmon.coordcheck.plot import draw
from distmon.coordcheck.verdicts import Verdict, verdicts_of
from distmon.coordcheck.workload import load_factory, parse_widths
from distmon.errors import ConfigError

_STYLES = {"ok": "green", "grows": "bold red", "shrinks": "bold red", "unclear": "yellow"}


def run_coordcheck(
    console: Console,
    model: str,
    widths: str,
    steps: int,
    seeds: int,
    lr: float,
    out: Path,
    plot: bool,
) -> bool:
    """Measure, print, write; return whether no module grows or shrinks with width."""
    if steps < 1 or seeds < 1 or not lr > 0:
        raise ConfigError("--steps and --seeds must be at least 1, and --lr above 0")
    chosen = parse_widths(widths)
    factory = load_factory(model, BUILT_IN, lr)
    with console.status("training") as status:
        found = measure(factory, chosen, seeds, steps, status.update)
    if not found:
        raise ConfigError("no module of the model returns a floating tensor")
    verdicts = verdicts_of(found)
    console.print(_table(verdicts, chosen, steps))
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = {"widths": chosen, "steps": steps, "seeds": seeds, "model": model}
        rows = [asdict(each) for each in verdicts]
        (out / "coordcheck.json").write_text(json.dumps({**written, "modules": rows}, indent=1))
        if plot:
            title = f"{model}: widths {chosen[0]} to {chosen[-1]}"
            draw(found, verdicts, title, out / "coordcheck.png")
    except OSError as error:
        raise ConfigError(f"cannot write to --out {out}: {error.strerror}") from None
    failed = [each for each in verdicts if not each.passes]
    console.print(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} modules keep their size; "
        f"written to {out}",
        markup=False,
        highlight=False,
    )
    return not failed


def _table(verdicts: Sequence[Verdict], widths: Sequence[int], steps: int) -> Table:
    table = Table(title=f"slopes over widths {', '.join(map(str, widths))} after {steps} steps")
    for column in ("module", "change", "size", "verdict"):
        table.add_column(column)
    for each in verdicts:
        verdict = Text(each.verdict, style=_STYLES[each.verdict])
        table.add_row(Text(each.module), str(each.moved), str(each.size), verdict)
    return table
