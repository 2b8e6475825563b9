"""Train the runs of the second corpus and keep what a replay needs.

    python -m benchmarks.alarms.record_cases --to FOLDER [NAME ...] [--half blind] [--seed 0]
    python -m benchmarks.alarms.record_cases --to FOLDER --pack [--half blind]

A run takes one to ten seconds on one core. Runs of one rank share a process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import distmon
from benchmarks.alarms.cases import HALVES, Case
from benchmarks.alarms.corpus import CASES, compact, pack
from benchmarks.alarms.kinds.setup import Loop


def train(case: Case, seed: int, folder: Path, **settings_too: Any) -> None:
    """Train one case in this process, with the recording in `folder`.

    `settings_too` are further settings of the monitor.
    """
    torch.manual_seed(seed)
    setup, fault = case.build(seed), case.fault()
    fault.begin(setup)
    settings = {
        "run_dir": folder,
        "sinks": ["jsonl", "arrow"],
        "interval": case.interval,
        "budget": None,
        "percentiles": False,
        "writer": "thread",  # many short runs: a process for each takes longer than they do
        **setup.config,
        **settings_too,
    }
    models = setup.models if len(setup.models) > 1 else setup.models[0]
    with distmon.attach(models, setup.optimizers, settings) as monitor:
        Loop(setup, fault, monitor).run(case.steps)


def _train_rank(rank: int, name: str, seed: int, scratch: str) -> None:
    torch.set_num_threads(1)
    where = Path(scratch)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where.resolve() / 'store'}",
        rank=rank,
        world_size=CASES[name].ranks,
    )
    train(CASES[name], seed, where / name)
    dist.destroy_process_group()


def record(case: Case, seed: int, kept: Path) -> int:
    """Replace the recording of a case; return its size in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        before = os.getcwd()
        os.chdir(scratch)  # a relative folder, so that the recording does not say where it was
        try:
            if case.ranks > 1:
                mp.spawn(_train_rank, (case.name, seed, "."), nprocs=case.ranks)  # type: ignore
            else:
                train(case, seed, Path(case.name))
        finally:
            os.chdir(before)
        return compact(Path(scratch) / case.name, kept / case.name)


def main(arguments: Sequence[str]) -> int:
    """Record the cases that are named, or all."""
    parser = argparse.ArgumentParser(description="Trains and records the second corpus.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, required=True, help="where the run folders are")
    parser.add_argument("--pack", action="store_true", help="pack them into the archives instead")
    parser.add_argument("--half", choices=HALVES, help="only the runs of one set")
    parser.add_argument("--part", type=int, default=0, help="of --parts that run side by side")
    parser.add_argument("--parts", type=int, default=1)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.pack:
        for half in [asked.half] if asked.half else HALVES:
            print(f"{half}: {pack(asked.to, half) / 1e6:.2f} MB")
        return 0
    every = [CASES[name] for name in asked.names] or [
        case for case in CASES.values() if asked.half in (None, case.half)
    ]
    for case in every[asked.part :: asked.parts]:
        began = time.perf_counter()
        size = record(case, asked.seed, asked.to.resolve())
        took = time.perf_counter() - began
        print(f"{case.name}: {size / 1e3:.0f} kB, {took:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
