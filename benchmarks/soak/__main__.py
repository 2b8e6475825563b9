"""`python -m benchmarks.soak --minutes 60`: exit code 1 when training was harmed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.soak.soaking import soak


def main() -> int:
    """Soak and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("distmon").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="distmon-soak-") as folder:
        errors = Path(folder) / "stderr"
        kept = os.dup(2)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # the writer's, too
        try:
            soaked = soak(Path(folder), 60 * given.minutes, given.seed)
        finally:
            os.dup2(kept, 2)
        tracebacks = errors.read_text(errors="replace").count("Traceback (most recent call last)")
    print(f"{soaked.steps} steps, {soaked.faults} faults, seed {given.seed}")
    print(f"steps with another loss than the twin: {soaked.losses_differ}")
    print(f"exceptions that reached the loop: {len(soaked.exceptions)} {soaked.exceptions[:3]}")
    print(f"tracebacks printed: {tracebacks}")
    print(f"longest step: {soaked.longest_s:.2f} s")
    names = ("memory (MB per hour)", "open files (per hour)", "threads (per hour)")
    for column, name in enumerate(names, start=1):
        first, last = soaked.samples[0][column], soaked.samples[-1][column]
        print(f"{name}: {soaked.slope(column):+.2f}; from {first:.0f} to {last:.0f}")
    print(f"observed steps without a record: {soaked.missing}, without a word: {soaked.unnamed}")
    print("the run folder says:", *soaked.named[:5], *soaked.named[5:][-5:], sep="\n- ")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return int(bool(soaked.losses_differ or soaked.exceptions or tracebacks))


if __name__ == "__main__":
    sys.exit(main())
