"""Run the checks on one device, print a table, and write a file to send back."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import distmon
from distmon.selftest.checks import CHECKS
from distmon.selftest.not_here import NotHere, device_name
from distmon.untrusted.terminal import terminal


def run(device: torch.device) -> list[dict[str, str]]:
    """Return name, result (`ok`, `failed` or `not checked`) and detail of every check."""
    results = []
    for name, check in CHECKS:
        try:
            result, detail = "ok", check(device)
        except NotHere as error:
            result, detail = "not checked", str(error)
        except Exception as error:
            result, detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
        results.append({"check": name, "result": result, "detail": detail})
    return results


def describe(device: torch.device) -> dict[str, str]:
    """Return what a reader of the file must know about the machine."""
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    return {
        "distmon": distmon.__version__,
        "torch": str(torch.__version__),
        "triton": triton_version,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "device": f"{device} ({device_name(device)})",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m distmon.selftest", description=__doc__)
    default = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=str(default or "cpu"), help="torch device to check")
    parser.add_argument("--out", type=Path, default=Path("distmon-selftest.json"))
    given = parser.parse_args(arguments)
    device = torch.zeros((), device=given.device).device  # with its index
    results, machine = run(device), describe(device)
    table = Table("check", "result", "detail", title=" | ".join(machine.values()))
    for each in results:
        table.add_row(each["check"], each["result"], each["detail"])
    terminal().print(table)
    content: dict[str, Any] = {"machine": machine, "results": results}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {given.out}")
    return int(any(each["result"] == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())
