"""Run the checks of a module in child processes that have the simulated device.

A check is a function `check_...` without arguments. One process runs all checks of a module, or one
process per rank does, with a process group.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

TIMEOUT_S = int(os.environ.get("SIMULATED_CUDA_TIMEOUT_S", "1800"))
"""Of a process that hangs: all checks of a module take a minute, and ten on a busy machine."""
GROUP_TIMEOUT_S = 300


def names_of(module: str) -> list[str]:
    """Return the checks of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    return [
        each.name
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("check_")
    ]


def assert_passed(module: str, name: str, ranks: int = 1, **environment: str) -> None:
    """Fail with the traceback of a check that failed on some rank."""
    by_rank = _run(module, ranks, tuple(sorted(environment.items())))
    failures = [
        f"rank {rank}: {results.get(name, 'the process ended before this check')}"
        for rank, results in enumerate(by_rank)
        if results.get(name, "") is not None
    ]
    assert not failures, "\n".join(failures)


@cache
def _run(module: str, ranks: int, environment: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    return run_checks(module, ranks, dict(environment))


def run_checks(
    module: str, ranks: int, environment: Mapping[str, str], only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the traceback of each check by name, None for one that passed; by rank.

    `only`: the checks that are run; all without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "simulated_cuda.child", module, folder, *only],
                env={
                    **child_environment(),
                    **environment,
                    "RANK": str(r),
                    "WORLD_SIZE": str(ranks),
                },
                stderr=(Path(folder) / f"errors{r}").open("w"),
            )
            for r in range(ranks)
        ]
        for process in processes:
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        results = []
        for rank, process in enumerate(processes):
            lines = (Path(folder) / f"results{rank}").read_text().splitlines()
            found = dict(map(json.loads, lines))
            for name, error in found.items():
                if error == "began":  # the process ended in it
                    end = (Path(folder) / f"errors{rank}").read_text()[-3000:]
                    found[name] = f"the process ended with {process.returncode}\n{end}"
            results.append(found)
    return results


def child_environment() -> dict[str, str]:
    """Return the environment in which a child finds the package and its tests."""
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # the package is that of the path, wherever this was started
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def main() -> None:
    """Run the checks of a module on this rank."""
    module, folder = sys.argv[1], Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from simulated_cuda import device

    if lines := os.environ.get("SIMULATED_CUDA_LINES"):
        from simulated_cuda.line_tracer import trace_into

        trace_into(lines)
    out = (folder / f"results{rank}").open("a", buffering=1)
    device.install()
    import torch

    torch.set_num_threads(1)
    if world > 1:
        _join(folder, rank, world)
    checks = importlib.import_module(module)
    for name in sys.argv[3:] or names_of(module):
        out.write(json.dumps([name, "began"]) + "\n")
        try:
            getattr(checks, name)()
            error = None
        except BaseException:
            error = traceback.format_exc()
        out.write(json.dumps([name, error]) + "\n")
        device._drain()
        device.set_order(0)
        device.take_waits()
    if world > 1:
        from torch import distributed

        distributed.destroy_process_group()


def _join(folder: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    from simulated_cuda import collectives

    collectives.register()
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        f"cpu:gloo,cuda:{collectives.NAME}",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


if __name__ == "__main__":
    main()
