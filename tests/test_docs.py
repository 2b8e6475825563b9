"""Docs name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distmon.config import MonitorConfig
from distmon.rules import BUILTIN

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_key_and_every_rule_is_documented() -> None:
    keys = (ROOT / "docs/configuration.md").read_text()
    for name, field in MonitorConfig.model_fields.items():
        assert f"| `{name}` |" in keys
        assert " ".join(str(field.description).split()) in keys
    rules = (ROOT / "docs/rules.md").read_text()
    for rule in BUILTIN:
        (line,) = [row for row in rules.splitlines() if row.startswith(f"| `{rule.name}` |")]
        assert all(f"`{threshold}`" in line for threshold in rule.thresholds)
        assert f"| {rule.severity} |" in line
        assert line.endswith(f"| {rule.patience} |")


def test_tests_that_the_docs_name_exist() -> None:
    for page in ("security.md", "reliability.md"):
        file = ""
        text = (ROOT / "docs" / page).read_text()
        for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", text):
            file = path or file
            assert f"def {name}(" in (ROOT / file).read_text(), f"{page}: {file}::{name}"


def test_every_fault_of_the_accelerator_path_names_tests_that_exist() -> None:
    text = (ROOT / "docs/simulated_device.md").read_text()
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    code = "\n".join(sources.values())
    rows = text[text.index("| fault | test |") :].splitlines()[2:]
    assert len(rows) == 18
    for row in rows:
        _, fault, tests, *_ = row.split("|")
        names = re.findall(r"`(\w+(?:\.py)?)`", tests)
        assert names, fault
        for name in names:
            assert name in sources or f"def {name}(" in code, (fault, name)
