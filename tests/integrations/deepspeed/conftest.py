"""One pair of ranks does everything that needs ranks; the tests look at what is left of it.

Starting DeepSpeed takes longer than training a small engine with it.
"""

from __future__ import annotations

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
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="session")
def parts(pair_folder: Path) -> Callable[[int, str], Any]:
    """What a rank found in one part."""
    by_rank = run_ranks(everything, 2, str(pair_folder))

    def part(rank: int, name: str) -> Any:
        found = by_rank[rank][name]
        assert not isinstance(found, str), found
        return found

    return part


@pytest.fixture(scope="session")
def trained(parts: Callable[[int, str], Any]) -> list[Any]:
    """By rank, then by case."""
    return [parts(rank, "cases") for rank in range(2)]
