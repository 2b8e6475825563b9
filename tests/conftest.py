"""How the suite is run: one thread per process, and the files that take longest first.

Three workers share two cores, since tests wait for processes a third of the time. Each takes one
file after another: a long file that begins last would leave the others idle.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported here, and for all child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of tests attach a monitor in this process, and a writer process takes about a second to
# start. Tests of ranks, of the launcher and of the trainer run with the default; so do those of the
# writer itself.
os.environ.setdefault("DISTMON_WRITER", "thread")
# Hundreds of child processes import the package; without bytecode each of them compiles it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
LONGEST = (
    "verify/test_verify_matrix.py",
    "integrations/launcher/test_unmodified_training.py",
    "simulated_cuda/test_monitor_on_device.py",  # builds the device that others of its folder need
    "runtime/test_injected_faults.py",
    "integrations/deepspeed/test_engine_numbers.py",  # runs the ranks that others there look at
    "rules/test_second_corpus.py",
    "report/test_report_browser.py",
    "integrations/deepspeed/test_unmodified_scripts.py",
    "csrc_triton/test_compile.py",
    "launch/test_monitored_runs.py",
    "launch/test_trainer_runs.py",
    "test_contributing.py",
    "csrc_triton/test_sampled_stats.py",
    "launch/test_trainer_parallel.py",
    "launch/test_monitored_parallel.py",
    "csrc_triton/test_gradient_runs.py",
    "simulated_cuda/test_triton_on_device.py",
    "collect/inside/test_inside_ranks.py",
    "simulated_cuda/test_monitor_ranks_on_device.py",
    "integrations/launcher/test_launched_processes.py",
    "native/test_building.py",
    "benchmarks/test_footprint.py",
    "layout/test_planning_at_scale.py",
    "simulated_cuda/test_monitor_steps_on_device.py",
    "report/test_serve.py",
    "untrusted/test_fuzz.py",
    "verify/test_verify_command.py",
    "collect/inside/test_inside_faults.py",
    "runtime/test_cut_link.py",
    "integrations/test_framework_ranks.py",
    "integrations/deepspeed/test_trainer_zero.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, in their own order."""
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
