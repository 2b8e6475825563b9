"""How long the host transport takes on many ranks: an estimate from measured costs.

    python -m benchmarks.scale host-time
    python -m benchmarks.scale host-time --latency-us 30 --gigabytes-per-s 2.5

gloo reduces in a ring: each of n ranks sends 2 (n - 1) messages of a part of the buffer, one after
the other, so

    seconds = 2 (n - 1) x (latency + bytes / n / bandwidth)

Latency and bandwidth are fitted to all_reduces between two processes of this machine, or given. The
measured time of four processes is printed beside the formula's: they share the processors here.
Training waits for none of it; it is how much later a record comes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from csrc_triton.row_layout import BIN_WORDS
from distmon.reduce.reduced_view import BufferSizes
from distmon.runtime.row_measurement import MOST_HISTOGRAMS

NUMBERS: Final = (1, 1 << 12, 1 << 15, 1 << 18, 1 << 20)
"""float64 numbers in the buffers that are timed."""
REPEATS: Final = 15
MODELS: Final = {"GPT-2": 148, "llama-7b": 291, "llama-405b": 1137, "moe-100k": 99_907}
"""Parameters."""
WORLDS: Final = (8, 64, 512, 4096)


def _time_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = []
    for count in NUMBERS:
        buffer = torch.zeros(count, dtype=torch.float64)
        seconds = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            dist.all_reduce(buffer)
            seconds.append(time.perf_counter() - begin)
        found.append(statistics.median(seconds))
    if rank == 0:
        np.savetxt(f"{folder}/seconds", found)
    dist.barrier()


def measure(world: int) -> list[float]:
    """Return the median time of an all_reduce of each size between processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_time_rank, (world, folder), nprocs=world)  # type: ignore[no-untyped-call]
        return [float(each) for each in Path(folder, "seconds").read_text().split()]


def ring_seconds(world: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of one all_reduce."""
    return 2 * (world - 1) * (latency + nbytes / world / bandwidth)


def fit(world: int, seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency and bandwidth; each size counts by its relative error."""
    steps = 2 * (world - 1)
    weight = 1 / np.array(seconds)
    terms = np.array([[steps, steps * 8 * count / world] for count in NUMBERS])
    (latency, per_byte), *_ = np.linalg.lstsq(terms * weight[:, None], np.ones(len(NUMBERS)))
    return max(float(latency), 1e-6), 1 / max(float(per_byte), 1e-13)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was measured, and the estimates."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale host-time", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--latency-us", type=float, help="of a message, instead of this machine's")
    parser.add_argument("--gigabytes-per-s", type=float, help="of a rank's connection")
    options = parser.parse_args(arguments)
    two, four = measure(2), measure(4)
    latency, bandwidth = fit(2, two)
    print(f"this machine: {latency * 1e6:.0f} us a message, {bandwidth / 1e9:.2f} GB/s")
    for count, pair, quartet in zip(NUMBERS, two, four, strict=True):
        guess = ring_seconds(4, 8 * count, latency, bandwidth)
        print(
            f"  {8 * count:9} bytes: 2 ranks {pair * 1e3:8.2f} ms, 4 ranks {quartet * 1e3:8.2f} ms "
            f"(formula {guess * 1e3:.2f})"
        )
    latency = latency if options.latency_us is None else options.latency_us / 1e6
    bandwidth = bandwidth if options.gigabytes_per_s is None else options.gigabytes_per_s * 1e9
    print(
        f"estimates with {latency * 1e6:.0f} us a message and {bandwidth / 1e9:.2f} GB/s, seconds"
    )
    print(f"{'model':10} {'MB':>7} " + " ".join(f"{world:>7}" for world in WORLDS))
    for model, parameters in MODELS.items():
        words = BIN_WORDS[0] if parameters <= MOST_HISTOGRAMS else 0  # as sharded parameters have
        sizes = [BufferSizes(parameters, w, words, 100) for w in WORLDS]
        # The SUM and the MAX buffer are reduced side by side, through the same connection.
        times = [
            ring_seconds(w, s.nbytes, latency, bandwidth)
            for w, s in zip(WORLDS, sizes, strict=True)
        ]
        row = " ".join(f"{seconds:7.3f}" for seconds in times)
        print(f"{model:10} {sizes[-1].nbytes / 1e6:7.2f} {row}")
