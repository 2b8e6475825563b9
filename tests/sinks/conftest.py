"""Records of a made-up model, and an open run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_run import MakeRecord, OpenFolder, build_record, param_names

from distmon.runs.run_folder import RunFolder


@pytest.fixture
def make_record() -> MakeRecord:
    return build_record


@pytest.fixture
def open_folder(tmp_path: Path) -> OpenFolder:
    """Open the same folder again and again: one attempt each."""

    def start(resumed_from: int = 0, params: int = 3) -> RunFolder:
        table = [
            {
                "name": name,
                "shape": [4, 8],
                "dtype": "float32",
                "requires_grad": True,
                "sampled": 32,
            }
            for name in param_names(params)
        ]
        folder = RunFolder.open(tmp_path / "run", config={"interval": 10}, parameters=table)
        folder.begin_attempt(resumed_from=resumed_from, world_size=2)
        return folder

    return start
