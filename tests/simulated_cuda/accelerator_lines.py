"""How much of the code that a model on the CPU never runs is run on the simulated device.

    python -m simulated_cuda.accelerator_lines        (from the folder `tests`)

Which lines those are is read from the source: what an `if` guards that asks for an accelerator,
what follows one that returns on the host, and the parts in WHOLE, which work with device memory.
The checks run with a tracer of these lines. Prints executed and all such lines by file, those that
were missed, and the sum; the exit code is 1 below the goal.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from simulated_cuda.child import run_checks
from simulated_cuda.line_tracer import read_executed, write_wanted
from simulated_cuda.recorded_launches import driver_environment

ROOT = Path(__file__).parents[2]
GOAL = 0.95
TOOLS = ("bench", "verify", "selftest", "cli", "coordcheck", "report", "replay")
"""Folders of the package that no training runs."""
WHOLE = {
    "distmon/collect/inside/activation_rows.py": ("_add_by_triton",),
    "distmon/device.py": ("DeviceMark", "pinned"),
    "distmon/layout/host_copies.py": ("HostCopy", "copied_to_host", "_copy"),
    "distmon/probe/address_table.py": ("AddressTable", "in_memory_order", "is_dense"),
    "distmon/probe/triton_probe.py": ("TritonProbe", "_expected_dtype_sets"),
    "distmon/probe/backend.py": ("_compile_now",),
    "distmon/reduce/buffers.py": ("Buffers.put_owners", "Buffers.put_slot", "Buffers.put_losses"),
    "distmon/reduce/outbox.py": (
        "HostOutbox._ship_from_device",
        "DeviceOutbox._ship_from_device",
        "_Copied",
        "_copy",
    ),
    "csrc_triton/activation_stats.py": ("add_activation_stats",),
    "csrc_triton/snapshot.py": ("take_snapshot",),
    "csrc_triton/sampled_stats.py": ("fill_sampled_rows",),
    "csrc_triton/exact_stats.py": ("ExactTables", "fill_exact_columns"),
    "csrc_triton/gradient_runs.py": ("RunTables", "fill_run_columns"),
    "csrc_triton/nonfinite_counts.py": ("count_nonfinite",),
    "csrc_triton/tables.py": ("RowTables", "RowOutputs", "upload", "cut_into_chunks"),
}
_ACCELERATOR = re.compile(
    r"is_accelerator\(|\.is_cuda|type [!]= 'cpu'|type == 'cuda'|\bnot .*is_cpu"
)
_HOST = re.compile(r"not is_accelerator\(|^[\w.]*\.is_cpu$|type == 'cpu'$|type != 'cuda'$")


def accelerator_lines(text: str, whole: Sequence[str] = ()) -> set[int]:
    """Return the lines of statements that only an accelerator runs."""
    found: set[int] = set()
    tree = ast.parse(text)
    for name, node in _named(tree):
        if name in whole:
            found |= _statements(getattr(node, "body", []))
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                found |= _guarded(body)
    return found


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _guarded(body: list[ast.stmt]) -> set[int]:
    found: set[int] = set()
    for i, statement in enumerate(body):
        if not isinstance(statement, ast.If):
            continue
        test = ast.unparse(statement.test)
        if _HOST.search(test):
            found |= _statements(statement.orelse)
            if isinstance(statement.body[-1], ast.Return | ast.Continue | ast.Raise):
                found |= _statements(body[i + 1 :])
        elif _ACCELERATOR.search(test):
            found |= _statements(statement.body)
    return found


def _statements(body: Sequence[ast.stmt]) -> set[int]:
    """Return the first lines of all statements in a body, but those that are never executed."""
    found: set[int] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found |= _statements(statement.body)
            continue
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_field = isinstance(statement, ast.AnnAssign) and statement.value is None
        if not is_text and not is_field and not isinstance(statement, ast.Raise):
            found.add(statement.lineno)
        for name in ("body", "orelse", "finalbody"):
            found |= _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            found |= _statements(handler.body)
    return found


def wanted_lines() -> dict[str, set[int]]:
    """Return the lines of the package that only an accelerator runs, by path of the file."""
    found = {}
    for path in sorted([*(ROOT / "distmon").rglob("*.py"), *(ROOT / "csrc_triton").glob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[1] not in TOOLS:
            lines = accelerator_lines(path.read_text(), WHOLE.get(name, ()))
            if lines:
                found[str(path)] = lines
    return found


def run_all(wanted: dict[str, set[int]]) -> dict[str, set[int]]:
    """Run all checks of the monitor; return the wanted lines that were executed."""
    with tempfile.TemporaryDirectory() as folder:
        write_wanted(Path(folder), wanted)
        traced = {"SIMULATED_CUDA_LINES": folder}
        (Path(folder) / "driver").mkdir()
        interpreted = {"TRITON_INTERPRET": "1", "SIMULATED_CUDA_READABLE": "1"}
        for module, ranks, environment in (
            ("monitor_checks", 1, {}),
            ("monitor_step_checks", 1, {}),
            ("path_checks", 1, {}),
            ("monitor_rank_checks", 2, {}),
            ("no_float64_checks", 1, {"SIMULATED_CUDA_NO_FLOAT64": "1"}),
            ("triton_checks", 1, interpreted),
            ("launch_checks", 1, driver_environment(Path(folder) / "driver")),
        ):
            begin = time.monotonic()
            results = run_checks(f"simulated_cuda.{module}", ranks, {**traced, **environment})
            for result in results:
                for name, error in result.items():
                    if error is not None:
                        print(f"{name} failed\n{error}", file=sys.stderr)
            seconds = time.monotonic() - begin
            print(f"{module}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return read_executed(Path(folder))


def main() -> int:
    """Print the table; return 1 below the goal."""
    wanted = wanted_lines()
    executed = run_all(wanted)
    reached = total = 0
    for path, lines in wanted.items():
        missed = sorted(lines - executed.get(path, set()))
        reached += len(lines) - len(missed)
        total += len(lines)
        listed = f"  missed: {', '.join(map(str, missed))}" if missed else ""
        name = Path(path).relative_to(ROOT).as_posix()
        print(f"{len(lines) - len(missed):4} of {len(lines):4}  {name}{listed}")
    print(f"{reached} of {total} lines: {100 * reached / total:.1f}%")
    return int(reached < GOAL * total)


if __name__ == "__main__":
    sys.exit(main())
