"""Train the healthy runs of the second corpus with `inside: all` and count false warnings.

    python -m benchmarks.alarms.inside_runs [NAME ...] [--first-of-kind] [--seed 0]

Recordings do not hold what is measured inside a model, so the runs are trained anew; one takes some
ten seconds on one core. Alerts of all rules count, those about the inside are counted once more by
themselves. Exit code 1 with more than 0.1 warnings per run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

import distmon
from benchmarks.alarms.cases import Case
from benchmarks.alarms.corpus import CASES
from benchmarks.alarms.record_cases import train
from distmon.rules import activations, attention, experts, spectra

INSIDE_RULES: Final = frozenset(
    rule.name for module in (activations, attention, experts, spectra) for rule in module.RULES
)
MOST_PER_RUN: Final = 0.1


def alerts_of(case: Case, seed: int) -> list[dict[str, Any]]:
    """Train one case with everything inside the model watched and return its alerts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        train(case, seed, folder, inside="all", sinks=["jsonl"])
        return distmon.read_run(folder).alerts


def main(arguments: Sequence[str]) -> int:
    """Train the cases that are named, or all healthy ones of one rank, and print the counts."""
    parser = argparse.ArgumentParser(description="Healthy runs with everything inside watched.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--first-of-kind", action="store_true", help="one run of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [c for c in CASES.values() if c.expected is None and c.ranks == 1]
    if options.first_of_kind:
        cases = [*{c.kind: c for c in reversed(cases)}.values()][::-1]
    if options.names:
        cases = [CASES[name] for name in options.names]
    found: Counter[tuple[str, str]] = Counter()
    for number, case in enumerate(cases, 1):
        alerts = alerts_of(case, options.seed)
        found.update((alert["rule"], alert["severity"]) for alert in alerts)
        print(f"{number}/{len(cases)} {case.name}: {len(alerts)} alerts", flush=True)
        for alert in alerts:
            text = " ".join(str(alert[key]) for key in ("step", "severity", "rule", "message"))
            print(f"  {text}", flush=True)
    for (rule, severity), count in found.most_common():
        print(f"{rule}, {severity}: {count}")
    warnings = {key: n for key, n in found.items() if key[1] != "info"}
    inside = sum(n for (rule, _), n in warnings.items() if rule in INSIDE_RULES)
    total = sum(warnings.values())
    print(f"{total} warnings in {len(cases)} healthy runs: {total / len(cases):.2f} per run,")
    print(f"{inside} of them of the rules about the inside of the model")
    return 1 if total > MOST_PER_RUN * len(cases) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
