"""The rooms of the package are layers: each imports from the rooms above it and from itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distmon

PACKAGE = Path(distmon.__file__).parent

LAYERS = (
    ("lazy_exports", "guarded_log", "own_threads", "errors", "redaction", "metrics", "device"),
    ("untrusted",),
    ("config",),
    ("native",),
    ("layout",),
    ("sampling",),
    ("probe",),
    ("collect",),
    ("reduce",),
    ("record",),
    ("rules",),
    ("runs",),
    ("sinks",),
    ("writer",),
    ("replay",),
    ("report",),
    ("runtime",),
    ("monitor",),
    ("attach",),
    ("integrations",),
    ("deepspeed",),  # the public name of integrations.deepspeed
    ("verify",),
    ("bench", "selftest", "coordcheck"),
    ("cli",),
)
"""From top to bottom; rooms of one layer do not import each other."""
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def _imports(path: Path) -> set[str]:
    """The rooms that a module imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "distmon":
                names = [f"distmon.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("distmon.")}
    return found


def test_every_room_has_its_layer() -> None:
    assert {_room(path) for path in _modules()} == set(LAYER)


def test_a_room_imports_only_from_layers_above_it() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in _modules()
        for room in _imports(path)
        if room != _room(path) and LAYER[room] >= LAYER[_room(path)]
    ]
    assert wrong == []


def test_the_flat_modules_are_the_foundation_and_the_top() -> None:
    """A module that belongs to one room lies in it."""
    flat = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert flat == {*LAYERS[0], "monitor", "attach", "deepspeed"}


def test_kernels_do_not_know_distmon() -> None:
    for path in (PACKAGE.parent / "csrc_triton").rglob("*.py"):
        assert not _imports(path), path
        assert "import distmon" not in path.read_text(), path


def test_importing_distmon_loads_no_optional_package() -> None:
    code = (
        "import sys, distmon; "
        "print([m for m in ('wandb', 'tensorboard', 'deepspeed') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


TRAINING_WITH_A_MONITOR = """
import math, sys, torch, distmon

blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(monitor, steps):
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.check(grad_norm=1.0)
            monitor.step(loss=loss, tokens=32)

train(None, 1)
sinks, (run_dir, writer) = ("console", "jsonl", "arrow", "tensorboard"), sys.argv[1:]
monitor = distmon.attach(model, optimizer, interval=2, run_dir=run_dir, sinks=sinks, writer=writer)
before = {*sys.modules}
train(monitor, 5)
monitor.evaluated(val_loss=0.5)
train(monitor, 5)
monitor.step(loss=math.nan)  # alerts at once
train(monitor, 4)
monitor.state_dict(), monitor.last_record
print("imported:", sorted({*sys.modules} - before))
monitor.close()
"""


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_nothing_is_imported_in_the_training_process_after_attach(
    tmp_path: Path, writer: str
) -> None:
    """A first import holds a step for as long as the file system takes."""
    arguments = [sys.executable, "-c", TRAINING_WITH_A_MONITOR, str(tmp_path / "run"), writer]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "imported: []" in output.stdout


PARALLELISMS = re.compile(
    r"[Ff][Ss][Dd][Pp]|fully_shard|DTensor|ZeRO|\bzero[0123]\b|\b[Pp]lacement|StridedShard"
    r"|\bDDP\b|\bddp\b|DistributedDataParallel"
)


@pytest.mark.parametrize("room", sorted(set(LAYER) - {"layout", "verify"}))
def test_only_layout_and_verify_know_a_parallelism_by_name(room: str) -> None:
    for path in _modules():
        if _room(path) == room:
            found = PARALLELISMS.findall(path.read_text())
            assert not found, f"{path.relative_to(PACKAGE)} names {found}"
