"""What CONTRIBUTING.md shows works: a rule, a sink, a parallelism and a metric in a copy of the
package, added as they are written there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(python|diff) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(
    re.findall(
        r"^## (Add [\w ]+)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
)


def _apply(section: str, copy: Path) -> None:
    """Write the new files of a section, and insert its lines after the line above them."""
    blocks = BLOCK.findall(SECTIONS[section])
    assert blocks
    for kind, name, text in blocks:
        file = copy / name
        if kind == "python":
            assert not file.exists(), name
            file.write_text(text)
            continue
        above = "".join(line[1:] + "\n" for line in text.splitlines() if line.startswith(" "))
        added = "".join(line[1:] + "\n" for line in text.splitlines() if line.startswith("+"))
        content = file.read_text()
        assert content.count(above) == 1, f"{above!r} is not one place in {name}"
        assert len(added.splitlines()) == 1, "one line is enough"
        file.write_text(content.replace(above, above + added))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is, ready to be changed."""
    # With its bytecode, which is that of these files: compiling all of them takes seconds.
    for package in ("distmon", "csrc_triton"):
        shutil.copytree(ROOT / package, tmp_path / "copy" / package)
    return tmp_path / "copy"


def _run(copy: Path, *arguments: str) -> str:
    """Output of a Python process that imports the copy."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(ROOT / "tests")))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SMALL_RUN = """
import sys
from pathlib import Path
import distmon
from small_runs import observe

assert Path(distmon.__file__).is_relative_to(Path.cwd()), distmon.__file__
"""


def test_every_section_is_tested() -> None:
    assert [*SECTIONS] == ["Add a rule", "Add a sink", "Add a parallelism", "Add a metric"]


def test_a_new_rule_fires(copy: Path) -> None:
    _apply("Add a rule", copy)
    code = """
observe(Path("out"), steps=2, rules={"loss_limit": {"loss": 1e-6}})
print([(a["rule"], a["step"]) for a in distmon.read_run("out/run").alerts])
"""
    assert "('loss_limit', 1)" in _run(copy, "-c", SMALL_RUN + code)
    assert "loss_limit" in _run(copy, "-m", "distmon.cli.main", "rules")


def test_a_new_sink_receives_records(copy: Path) -> None:
    _apply("Add a sink", copy)
    code = """
records = observe(Path("out"), steps=3, sinks=["loss_csv"])
print(records[-1].metrics["train/step_loss"])
"""
    last = _run(copy, "-c", SMALL_RUN + code).split()[-1]
    lines = (copy / "out" / "run" / "loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["1", "2", "3"]
    assert lines[-1] == f"3,{last}"


def test_a_new_parallelism_is_captured_and_verified(copy: Path) -> None:
    _apply("Add a parallelism", copy)
    output = _run(
        *(copy, "-m", "distmon.cli.main", "verify", "--parallel", "plain,split-rows"),
        *("--ranks", "2", "--steps", "4"),
    )
    assert "split-rows" in output
    assert "2 right, 0 skipped, 0 off" in output


def test_a_layout_that_is_wrong_is_off(copy: Path) -> None:
    """The check above would notice: here every rank says that it holds the first rows."""
    _apply("Add a parallelism", copy)
    file = copy / "distmon" / "layout" / "split_rows.py"
    right = file.read_text()
    wrong = right.replace("start = parameter.first_row * row", "start = 0")
    assert wrong != right
    file.write_text(wrong)
    with pytest.raises(AssertionError, match="1 off: split-rows"):
        _run(
            *(copy, "-m", "distmon.cli.main", "verify", "--parallel", "split-rows"),
            *("--ranks", "2", "--steps", "4"),
        )


def test_a_new_metric_reaches_the_record_and_the_docs(copy: Path) -> None:
    _apply("Add a metric", copy)
    code = """
records = observe(Path("out"), steps=2, rules={"mine": {"when": "wait_seconds >= 0"}})
print(records[-1].metrics["performance/wait_seconds"] >= 0)
print({a["rule"] for a in distmon.read_run("out/run").alerts})
"""
    output = _run(copy, "-c", SMALL_RUN + code)
    assert output.splitlines()[0] == "True"
    assert "mine" in output
    assert "| `performance/wait_seconds` | s | max over ranks |" in _run(
        copy, "-m", "distmon.cli.main", "metrics"
    )
