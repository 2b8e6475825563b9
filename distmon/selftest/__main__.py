"""Run the checks on one device, print a table, and write a file to send back."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import distmon
from distmon.device import is_accelerator
from distmon.selftest.checks import Check, all_checks
from distmon.selftest.not_here import NotHere, device_name, is_simulated
from distmon.selftest.transports import RANK_PROGRAM
from distmon.untrusted.terminal import terminal


def run(device: torch.device, checks: Sequence[Check]) -> list[dict[str, str]]:
    """Return name, result (`ok`, `failed` or `not checked`) and detail of every check.

    One that failed has its traceback too, for the file.
    """
    results = []
    console = terminal()
    for name, check in checks:
        found = {"check": name, "result": "ok"}
        try:
            with console.status(f"checking {name}"):
                found["detail"] = check(device)
        except NotHere as error:
            found |= {"result": "not checked", "detail": str(error)}
        except Exception as error:
            detail = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            found |= {"result": "failed", "detail": detail, "traceback": traceback.format_exc()}
        results.append(found)
    return results


def describe(device: torch.device) -> dict[str, str]:
    """Return what a reader of the file must know about the machine."""
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    where = str(device)
    if is_accelerator(device):
        where += f" of {torch.accelerator.device_count()} ({device_name(device)})"
    return {
        "distmon": distmon.__version__,
        "torch": str(torch.__version__),
        "triton": triton_version,
        "ROCm" if torch.version.hip else "CUDA": str(
            torch.version.hip or torch.version.cuda or "none"
        ),
        "python": platform.python_version(),
        "device": where,
    }


def main(arguments: Sequence[str] | None = None, rank_program: str = RANK_PROGRAM) -> int:
    """Run from the command line; 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m distmon.selftest", description=__doc__)
    default = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=str(default or "cpu"), help="torch device to check")
    parser.add_argument("--out", type=Path, default=Path("distmon-selftest.json"))
    given = parser.parse_args(arguments)
    device = torch.zeros((), device=given.device).device  # with its index
    results, machine = run(device, all_checks(rank_program)), describe(device)
    table = Table("check", "result", "detail", title=", ".join(map(" ".join, machine.items())))
    for each in results:
        table.add_row(each["check"], each["result"], each["detail"])
    terminal().print(table)
    simulated, ask = is_simulated(device), ""
    if simulated:
        print("SIMULATED: this is the device of distmon's tests. It shows nothing about a GPU.")
    elif not is_accelerator(device):
        print("No accelerator was checked: this ran on the CPU.")
    else:
        ask = "; please attach this file to an issue"
    content: dict[str, Any] = {"machine": machine, "simulated": simulated, "results": results}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    counts = Counter(each["result"] for each in results)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("ok", "failed", "not checked"))
    print(f"{summary}. Written to {given.out}{ask}.")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
