"""`python -m benchmarks.faults`: the matrix as a table; exit code 1 when training was harmed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch

import torch

from benchmarks.faults.matrix import Result, all_faults, run_faults
from benchmarks.faults.scene import Fault


def main() -> int:
    """Run the chosen faults and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="*", help="glob: disk, rules, sinks, values, ...")
    parser.add_argument("--name", default="*", help="glob of the names of faults")
    parser.add_argument("--writer", default="process", choices=("thread", "process"))
    parser.add_argument("--every", type=int, default=1, help="only every n-th fault")
    parser.add_argument("--from", type=int, default=0, dest="first", help="skip so many first")
    parser.add_argument("--progress", action="store_true", help="print every fault")
    given = parser.parse_args()
    chosen = [
        fault
        for fault in all_faults()
        if fnmatch(fault.family, given.family) and fnmatch(fault.name, given.name)
    ][given.first :: given.every]
    import distmon.attach  # imported once, so that the children of the fork need not
    import distmon.runtime.assembly  # noqa: F401

    # What torch imports with the first optimizer, for the same reason: seconds for each child.
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())

    started = time.monotonic()
    results: list[Result] = []
    try:
        for result in run_faults(_mixed(chosen), given.writer):
            results.append(result)
            _print_bad(result, given.progress)
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} of {len(chosen)} faults")
    print("\n".join(table(results)))
    load = os.getloadavg()[0]
    print(f"writer: {given.writer}; {time.monotonic() - started:.0f} s, load {load:.1f}")
    return 0 if all(result.survived for result in results) else 1


def _mixed(faults: Sequence[Fault]) -> list[Fault]:
    """Return the families in turn, so that the first faults are of all kinds."""
    numbers: Counter[str] = Counter()
    total = Counter(fault.family for fault in faults)
    places = []
    for fault in faults:
        places.append(numbers[fault.family] / total[fault.family])
        numbers[fault.family] += 1
    return [faults[at] for at in sorted(range(len(faults)), key=lambda at: places[at])]


def table(results: Sequence[Result]) -> list[str]:
    """Return the summary by family, as Markdown."""
    lines = [
        "| faults | tried | survived | losses identical | longest stall added "
        "| records lost silently | tracebacks |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    families = [*dict.fromkeys(result.fault.family for result in results), "all"]
    for family in families:
        rows = [r for r in results if family in (r.fault.family, "all")]
        lost = sum(r.lost_silently for r in rows)
        lossy = sum(r.lost_silently > 0 for r in rows)
        lines.append(
            f"| {family} | {len(rows)} | {sum(r.survived for r in rows)} "
            f"| {sum(r.same_losses for r in rows)} | {max(r.stall_s for r in rows):.2f} s "
            f"| {lost} in {lossy} faults | {sum(bool(r.outcome.traceback) for r in rows)} |"
        )
    return lines


def _print_bad(result: Result, always: bool) -> None:
    outcome = result.outcome
    marks = {
        "HARMED": not result.survived,
        f"{result.lost_silently} records lost silently": bool(result.lost_silently),
        "traceback": bool(outcome.traceback),
        f"stall {result.stall_s:.1f} s": result.stall_s > 1,
        f"attach {outcome.attach_s:.1f} s": outcome.attach_s > 10,
    }
    found = [mark for mark, holds in marks.items() if holds]
    if missing := len(outcome.missing):
        found.append(f"{missing} records missing")
    if found or always:
        print(f"{result.fault.family}: {result.fault.name}: {', '.join(found)}", flush=True)
        for text in (outcome.reached_loop, outcome.traceback):
            if text:
                print("    " + "\n    ".join(text.strip().splitlines()[-6:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
