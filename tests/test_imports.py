"""A datum flows in one direction, so a module imports only what is above it in the flow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import distmon

PACKAGE = Path(distmon.__file__).parent

# From first to last; a module may import those before it and those of its own name.
FLOW = (
    "errors",
    "alert",
    "redaction",
    "metrics",
    "config",
    "actions",
    "device_marks",
    "native",
    "layout",
    "sampling",
    "probe",
    "reduce",
    "catalogue",
    "record",
    "derive",
    "localise",
    "losses",
    "evaluations",
    "tasks",
    "ownership",
    "signals",
    "budget",
    "telemetry",
    "flow",
    "recording",
    "observer",
    "rules",
    "run_folder",
    "param_history",
    "reading",
    "replay",
    "sinks",
    "reporter",
    "judging",
    "monitor",
    "silent",
    "wiring",
    "deepspeed",
    "attaching",
    "verify",
    "cli",
)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
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


def test_every_part_has_its_place_in_the_flow() -> None:
    parts = {_part(p) for p in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts == set(FLOW)


def test_modules_import_only_what_is_above_them() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        if _part(path) != "__init__"
        for name in _imports(path)
        if FLOW.index(name) > FLOW.index(_part(path))
    ]
    assert wrong == []


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


def test_only_the_layout_knows_about_parallelism() -> None:
    words = re.compile(
        r"[Ff][Ss][Dd][Pp]|fully_shard|DTensor|ZeRO|\bzero[0123]\b|[Pp]lacement|StridedShard"
    )
    for path in PACKAGE.rglob("*.py"):
        if _part(path) != "layout":
            found = words.findall(path.read_text())
            assert not found, f"{path.relative_to(PACKAGE)} speaks of {found}"
