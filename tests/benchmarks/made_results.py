"""Results made by hand: every number is known, so every table and outcome is too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from distmon.bench.machine import Machine
from distmon.bench.results import Case, ResultsWriter

GPT2 = Case("gpt2", "fp32", "none", 1, 148, 124_439_808)
STEP = 5.0
SECONDS = {
    "distmon sampled": 2e-3,
    "distmon auto": 0.06,
    "distmon exact": 0.09,
    "foreach_norm": 0.04,
    "foreach_norm both": 0.08,
    "naive clone": 0.5,
    "naive hooks": 0.06,
    "olmo style": 0.7,
    "tensorboard": 3.2,
    "wandb.watch": 4.4,
}
MEMORY = {
    "distmon sampled": 1.3e6,
    "distmon auto": 1.3e6,
    "distmon exact": 2.6e6,
    "foreach_norm": 600,
    "foreach_norm both": 1200,
    "naive clone": 498e6,
    "naive hooks": 3e5,
    "olmo style": 498e6,
    "tensorboard": 310e6,
    "wandb.watch": 160e6,
}
MACHINE = Machine(
    command="python -m benchmarks.overhead --quick",
    date="2026-03-01T12:00:00+00:00",
    device="Processor of a test",
    cores=2,
    threads=2,
    load=0.1,
    versions="python 3.11.7, torch 2.13.0, distmon 0.1.0",
    commit="0123456",
)


def write(
    folder: Path,
    seconds: Mapping[str, float] = SECONDS,
    *,
    rounds: int = 7,
    noise: float = 0.02,
    seed: int = 0,
    cases: Sequence[Case] = (GPT2,),
    machine: Machine = MACHINE,
    wrong: Mapping[str, str] | None = None,
) -> Path:
    """Every contender takes its seconds in every case, times noise of its own in every round.

    `wrong`: what is wrong with an answer, by contender.
    """
    generator = np.random.default_rng(seed)
    with ResultsWriter(folder, machine) as results:
        for case in cases:
            for number in range(rounds):
                step = STEP * generator.lognormal(0, noise)
                results.add(case, "none", "step", number, step)
                for name, value in seconds.items():
                    measured = value * generator.lognormal(0, noise)
                    results.add(case, name, "observation", number, measured)
            results.add(case, "distmon sampled", "unobserved_step", 0, 9e-6)
            results.add(case, "composer", "skipped", 0, 0.0, "mosaicml is not installed")
            for name in seconds:
                results.add(case, name, "extra_memory", 0, MEMORY.get(name, 0.0))
                what = (wrong or {}).get(name, "")
                results.add(case, name, "answer", 0, float(not what), what)
            for name, tags in {"distmon sampled": 29, "tensorboard": 296}.items():
                if name in seconds:
                    results.add(case, name, "tags", 0, tags)
    return folder


def write_growing(folder: Path, few: bool = False) -> Path:
    """Tensors, elements and ranks at several sizes: 4 us per tensor, flat in the others.

    `few`: only two numbers of tensors, because plots take time.
    """
    generator = np.random.default_rng(1)
    grow = {
        "distmon sampled": lambda c: 4e-6 * c.tensors + (3e-4 * (c.ranks - 1)),
        "distmon exact": lambda c: 6e-10 * c.elements,
        "naive clone": lambda c: 3e-9 * c.elements + 2e-5 * c.tensors,
        "foreach_norm": lambda c: 3e-10 * c.elements + 1e-6 * c.tensors,
    }
    cases = [GPT2]
    cases += [Case(f"tensors-{n}", "fp32", "none", 1, n, 256 * n) for n in (100, 1000, 10_000)]
    cases += [
        Case(f"elements-{n}", "fp32", "none", 1, 64, 64 * n) for n in (10_000, 100_000, 10**6)
    ]
    cases += [Case("small-gpt", "fp32", "ddp", n, 76, 12_000_000) for n in (1, 2, 4)]
    with ResultsWriter(folder, MACHINE) as results:
        for case in cases[:3] if few else cases:
            values = SECONDS if case == GPT2 else {name: f(case) for name, f in grow.items()}
            for number in range(7):
                results.add(case, "none", "step", number, STEP)
                for name, value in values.items():
                    measured = value * generator.lognormal(0, 0.03)
                    results.add(case, name, "observation", number, measured)
            for name in values:
                results.add(case, name, "extra_memory", 0, MEMORY[name])
            results.add(case, "distmon sampled", "tags", 0, 29)
            if case.ranks > 1:
                results.add(case, "all_reduce", "collective", 0, 3e-4 * (case.ranks - 1))
    return folder
