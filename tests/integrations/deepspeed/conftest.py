"""One pair of ranks does everything that needs ranks; the tests look at what is left of it.

Starting DeepSpeed takes longer than training a small engine with it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from two_ranks import everything

_spec = find_spec("deepspeed")
# This folder has the package's name, and a folder alone would do for a specification.
collect_ignore_glob = [] if _spec is not None and _spec.origin is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a parallel run: the files of this folder go to any of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pair"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def parts(pair_folder: Path) -> Callable[[int, str], Any]:
    """What a rank found in one part."""
    found = pair_folder / "found"
    with (pair_folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_bytes(pickle.dumps(run_ranks(everything, 2, str(pair_folder))))
    by_rank = pickle.loads(found.read_bytes())

    def part(rank: int, name: str) -> Any:
        found = by_rank[rank][name]
        assert not isinstance(found, str), found
        return found

    return part


@pytest.fixture(scope="session")
def trained(parts: Callable[[int, str], Any]) -> list[Any]:
    """By rank, then by case."""
    return [parts(rank, "cases") for rank in range(2)]
