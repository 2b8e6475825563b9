"""Repeat a healthy run and count the alerts of the rules about time: there should be none.

    python -m benchmarks.alarms.clean_runs [--runs 20] [--ranks 4] [--steps 60] [--interval 5]

The busier the machine and the more ranks per core, the more it proves. With `--straggler RANK` that
rank is slowed down from the middle on, and has to be named within two observations, it alone. Exit
code 1 when there is any other alert.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import distmon

TRAINER = Path(__file__).resolve().parents[2] / "launch/train.py"
RULES = ("straggler", "step_time_jitter", "throughput_drop", "dataloader_bound")


@dataclass(frozen=True)
class Outcome:
    """The alerts of one run, and its conditions."""

    load: float
    """Running processes when it ended, mean over a minute."""
    step_seconds: float
    cost: float
    """The monitor's own share of the time."""
    alerts: list[dict[str, Any]]

    def count(self, rule: str) -> int:
        """Return the number of alerts of one rule."""
        return sum(alert["rule"] == rule for alert in self.alerts)


def run_once(arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Train once in `folder`; RuntimeError when the trainer fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.ranks}", "--", str(TRAINER), "--monitor"]
    command += [f"--steps={arguments.steps}", f"--monitor.interval={arguments.interval}"]
    command += ["--eval-every=0", "--save-every=0", "--monitor.sinks=jsonl"]
    command += ["--monitor.run-dir=run"]
    if arguments.straggler is not None:
        command += ["--inject=straggler", f"--inject-rank={arguments.straggler}"]
        command += [f"--inject-at={first_slow_step(arguments)}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"the trainer ended with {ended.returncode}:\n{ended.stderr}")
    run = distmon.read_run(folder / "run")
    alerts = [alert for alert in run.alerts if alert["rule"] in RULES]
    metrics = [record["metrics"] for record in run.records]
    return Outcome(
        os.getloadavg()[0],
        median(each["performance/step_seconds"] for each in metrics),
        median(each["performance/monitor_fraction"] for each in metrics),
        alerts,
    )


def first_slow_step(arguments: argparse.Namespace) -> int:
    """Return the step after the observation in the middle of the run."""
    middle: int = arguments.steps // arguments.interval // 2 * arguments.interval
    return middle + 1


def mistakes(outcome: Outcome, arguments: argparse.Namespace) -> list[str]:
    """Return wrong alerts and missing ones, in words."""
    if arguments.straggler is None:
        return [f"{a['rule']} at step {a['step']}: {a['message']}" for a in outcome.alerts]
    named = [alert for alert in outcome.alerts if alert["rule"] == "straggler"]
    wrong = [
        f"{alert['message']} (step {alert['step']})"
        for alert in named
        if alert["ranks"] != [arguments.straggler]
    ]
    due = first_slow_step(arguments) - 1 + 2 * arguments.interval
    if not any(alert["ranks"] == [arguments.straggler] and alert["step"] <= due for alert in named):
        wrong.append(f"rank {arguments.straggler} was not named by step {due}")
    return wrong


def main() -> int:
    """Run all and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description="Repeats a healthy run and counts false alarms.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--straggler", type=int, metavar="RANK")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders here")
    arguments = parser.parse_args()
    console = Console(width=130)
    table = Table("run", "load", "ms/step", "monitor", *RULES, "seconds", "mistakes")
    wrong: list[str] = []
    for number in range(1, arguments.runs + 1):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.keep / str(number) if arguments.keep else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            outcome = run_once(arguments, folder)
        found = mistakes(outcome, arguments)
        wrong += [f"run {number}: {each}" for each in found]
        cells = [f"{outcome.load:.1f}", f"{1000 * outcome.step_seconds:.0f}", f"{outcome.cost:.2%}"]
        cells += [str(outcome.count(rule)) for rule in RULES]
        cells += [f"{time.perf_counter() - began:.0f}", str(len(found))]
        table.add_row(str(number), *cells)
        print(number, *cells, *found, flush=True)
    console.print(table)
    for each in wrong:
        console.print(each, markup=False)
    cores = len(os.sched_getaffinity(0))
    console.print(
        f"{arguments.runs} runs of {arguments.steps} steps on {arguments.ranks} ranks and {cores} "
        f"cores, {arguments.steps // arguments.interval} observations each: {len(wrong)} mistakes"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
