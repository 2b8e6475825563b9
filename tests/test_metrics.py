"""Every metric is declared once; docs, records and renamed metrics follow the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import observe

import distmon
from distmon.cli.metrics_page import page
from distmon.config import RuleConfig
from distmon.metrics import (
    GRAD_PERCENTILES,
    NAMED_METRICS,
    OWN_PHASES,
    PARAM_METRICS,
    PERCENTILE_METRICS,
    PHASES,
    RANK_METRICS,
    RENAMED,
    RUN_METRICS,
    Metric,
    current_name,
    metric_table,
)
from distmon.replay.column_names import choose_columns, parse_map
from distmon.replay.run_folders import records_of_run
from distmon.rules import with_users_rules

ROOT = Path(__file__).resolve().parents[1]
TABLES = (RUN_METRICS, PARAM_METRICS, PERCENTILE_METRICS, RANK_METRICS, NAMED_METRICS)


def test_the_page_equals_the_tables() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "distmon.cli.main", "metrics"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == page() == (ROOT / "docs/metrics.md").read_text()
    for metric in (metric for table in TABLES for metric in table):
        line = f"| `{metric.name}` | {metric.unit} | {metric.reduction} | {metric.help} |"
        assert line in page()


def test_a_duplicate_or_an_unknown_reduction_raises() -> None:
    line = "a/b | s | max over ranks of step_seconds | something"
    (metric,) = metric_table(line)
    assert metric == Metric("a/b", "s", "max over ranks", "something", "step_seconds")
    with pytest.raises(ValueError, match=r'the metric "a/b" is declared twice'):
        metric_table(f"{line}\n{line}")
    with pytest.raises(ValueError, match="unknown reduction"):
        metric_table("a/b | s | sum over blocks | something")


def test_every_metric_is_described_and_reduces_what_exists() -> None:
    rank_metrics = {metric.name for metric in RANK_METRICS}
    for metric in (metric for table in TABLES for metric in table):
        assert metric.help
        assert not metric.rank_metric or metric.rank_metric in rank_metrics
        assert not metric.rank_metric or metric.reduction.endswith(" over ranks")


def test_the_tables_follow_phases_and_percentiles() -> None:
    run, rank = ({metric.name for metric in table} for table in (RUN_METRICS, RANK_METRICS))
    assert run >= {f"performance/{phase}_fraction" for phase in PHASES}
    assert rank >= {f"{phase}_seconds" for phase in PHASES}
    assert {name for name in rank if "floor" in name} == {
        f"{phase}_floor_seconds" for phase in OWN_PHASES
    }
    assert [m.name for m in PERCENTILE_METRICS] == [f"grad_p{q}" for q in GRAD_PERCENTILES]


def test_a_record_holds_declared_metrics_only(tmp_path: Path) -> None:
    *_, record = observe(tmp_path, steps=3)
    named = tuple(metric.name.partition("{")[0] for metric in NAMED_METRICS)
    declared = {metric.name for metric in RUN_METRICS}
    assert {tag for tag in record.metrics if not tag.startswith(named)} <= declared
    assert [*record.params.columns] == [metric.name for metric in PARAM_METRICS]
    assert record.ranks.keys() <= {metric.name for metric in RANK_METRICS}


def _old_names() -> Iterator[tuple[str, str]]:
    """Each renamed metric, in full and without its group."""
    for old, new in RENAMED.items():
        yield old, new
        yield old.rpartition("/")[2], new.rpartition("/")[2]


@pytest.mark.parametrize(("old", "new"), sorted(set(_old_names())))
def test_old_names_lead_to_new_ones(old: str, new: str) -> None:
    assert current_name(old) == new
    assert current_name(new) == new
    assert current_name("train/lr") == "train/lr"


def test_a_run_folder_of_0_1_reads_under_the_new_names(tmp_path: Path) -> None:
    observe(tmp_path, steps=2)
    file = tmp_path / "run" / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["metrics"]["hardware/utilisation"] = 0.25
        line["ranks"]["gpu_utilisation"] = [0.25]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = distmon.read_run(tmp_path / "run")
    for entry, record in zip(run.records, records_of_run(run), strict=True):
        assert entry["metrics"]["hardware/utilization"] == 0.25
        assert record.metrics["hardware/utilization"] == 0.25
        assert record.ranks["gpu_utilization"].tolist() == [0.25]
        assert not RENAMED.keys() & {*entry["metrics"], *entry["ranks"]}


@pytest.mark.parametrize("name", ["utilisation", "'hardware/utilisation'", "utilization"])
def test_a_rule_of_a_user_may_use_the_old_name(name: str, tmp_path: Path) -> None:
    settings = {"mine": RuleConfig(when=f"{name} < 0.5")}
    (rule,) = with_users_rules((), settings)
    *_, record = observe(tmp_path, steps=1)
    findings = []
    for value in (0.9, 0.2):
        changed = {**record.metrics, "hardware/utilization": value}
        now = type(record)(**{**vars(record), "metrics": changed})
        findings.append([*rule.check(now, {}, {})])
    assert [len(found) for found in findings] == [0, 1]


def test_needs_and_logs_may_use_the_old_name() -> None:
    @distmon.rule(needs=["hardware/utilisation"])
    def idle(record: object, limits: object, memory: object) -> list[object]:  # noqa: ARG001
        return []

    assert idle.needs == ("hardware/utilization",)
    chosen = choose_columns(["hardware/utilisation", "loss"], {})
    assert chosen["hardware/utilization"] == "hardware/utilisation"
    assert parse_map(["hardware/utilisation=util"]) == {"hardware/utilization": "util"}
