"""The README is true: its snippets run, its commands exist. docs/run_readme.py runs all of it."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distmon.cli.main import app
from distmon.integrations.launcher.command import split

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from run_readme import blocks, commands, not_of_the_repository, only_with  # noqa: E402

BLOCKS = blocks((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        yield Path.cwd()


def test_snippets_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = [block for language, block in BLOCKS if language == "python"]
    assert len(snippets) == 2
    for snippet in snippets:
        names: dict[str, Any] = {}
        exec(compile(snippet, "README.md", "exec"), names)
        if "tracker" in names:
            names["tracker"].finish()
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("step:")] == [
        "step:10",
        "step:100",
        "step:200",
    ]
    assert (folder / "runs/latest/run.json").exists()


def _options() -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@pytest.mark.parametrize(
    "command", [line for language, block in BLOCKS if language == "sh" for line in commands(block)]
)
def test_commands_exist(command: str, folder: Path) -> None:
    program, *arguments = command.split()
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in re.findall(r"\[(\w+)\]", command):
            assert name in extras["optional-dependencies"]
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "torchrun":
        assert (ROOT / _options().parse_args(arguments).training_script).exists()
    elif arguments[0] == "run":
        assert (ROOT / split(arguments[1:]).script[0]).exists()
    else:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "runs/latest" not in done.output or (folder / "runs/latest").exists()


def test_the_fresh_virtualenv_does_not_see_the_one_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/a virtualenv")
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join(["/first", own, "/second"])
    environment = only_with(tmp_path, {"PATH": path, "PYTHONPATH": "/x", "HOME": "/h"})
    expected = os.pathsep.join([str(tmp_path), "/first", "/second"])
    assert environment == {"PATH": expected, "HOME": "/h"}


def test_every_package_is_in_the_copy() -> None:
    packages = {path.parent for path in (ROOT / "distmon").rglob("__init__.py")}
    for package in packages:
        assert not not_of_the_repository(str(package.parent), [package.name]), package
    assert not_of_the_repository(str(ROOT), ["runs", "distmon"]) == {"runs"}


def test_every_command_of_the_table_is_one() -> None:
    table = re.findall(r"^distmon (\w+) .*\S {2,}\S", (ROOT / "README.md").read_text(), re.M)
    known = {each.name or each.callback.__name__ for each in app.registered_commands}  # type: ignore
    assert {*table} <= known
    assert len(table) > 8
