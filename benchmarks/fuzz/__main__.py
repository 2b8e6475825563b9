"""`python -m benchmarks.fuzz --inputs 20000`: exit code 1 for any traceback, hang or odd output."""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fuzz.fuzzing import Findings, Fuzzer


def main() -> int:
    """Run the fuzzer for a number of inputs or minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--commands", type=int, help="readers per input; default: all")
    given = parser.parse_args()
    # What a small file makes a reader allocate must fit: an attempt at more becomes a traceback.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    started = shown = time.monotonic()
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), given.seed)
        numbers = range(given.first, given.first + given.inputs)
        for number, findings in fuzzer.run(numbers, given.commands):
            now = time.monotonic()
            if now - shown > 60:
                shown = now
                text = "\n".join(findings.lines)
                seconds = f"{now - started:.0f} s, input {number}"
                print(f"{seconds}: {text}"[:20_000], flush=True)
            if now - started > 60 * given.minutes:
                break
    print("\n".join(findings.lines))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.monotonic() - started:.0f} s, peak memory {peak:.0f} MB, seed {given.seed}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
