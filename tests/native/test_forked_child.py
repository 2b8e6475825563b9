"""A training in a child that was forked from a process in which torch has used its threads.

The team of threads exists in the parent only. Work that is given to it in the child waits for ever,
where the training itself needs no threads.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SCRIPT = """
import sys
import torch
from test_forked_child import train_in_child

if "before" in sys.argv:
    import distmon.monitor
torch.set_num_threads(2)
torch.randn(1 << 20).exp()
sys.exit(train_in_child(sys.argv[1]))
"""
PATIENCE_S = 120.0


def train_in_child(folder: str) -> int:
    """Return 0 when a child that is forked now can train under the monitor."""
    child: Any = multiprocessing.get_context("fork").Process(target=_train, args=(folder,))
    child.start()
    child.join(PATIENCE_S)
    if child.is_alive():
        child.kill()
        return 1
    return int(child.exitcode)


class _Scales(nn.Module):
    """Multiplies elementwise: a product of matrices would wait for the team by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def _train(folder: str) -> None:
    import distmon

    model = _Scales()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    settings = {"interval": 2, "sinks": ["jsonl"], "run_dir": folder, "sample_size": "exact"}
    with distmon.attach(model, optimizer, **settings) as monitor:
        for _ in range(5):
            loss = model(torch.randn(64, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)
        assert monitor.last_record is not None


@pytest.mark.parametrize("imported", ["before", "after"])
def test_an_observation_in_a_forked_child_ends(tmp_path: Path, imported: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), imported],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
