from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sample_run import MakeRecord

from distmon.record.record import ParamTable, Record
from distmon.rules.alert import Alert
from distmon.runs.run_names import model_label, run_path_of_model
from distmon.sinks.console import LOG_WIDTH, ConsoleSink, record_line

ALERT = Alert(
    rule="frozen",
    severity="warning",
    step=60,
    message="2 parameters did not move for 3 observations although they require a gradient.",
    params=tuple(f"blocks.{i}.attn.qkv.weight" for i in range(7)),
    layers=("blocks.0",),
    ranks=(0, 3),
    advice=("Check that the optimizer holds [them].", "Raise the learning rate of their group."),
)


def terminal(width: int, *, is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=is_terminal, color_system=None)
    return console, out


def printed(out: io.StringIO) -> str:
    """What is on the terminal, where each line first erases the progress bar that may be there."""
    return out.getvalue().replace("\r\x1b[2K", "")


@pytest.fixture
def record(make_record: MakeRecord) -> Record:
    ratios = np.array([1e-3, 1.2e-2, np.nan])
    names = ("a.weight", "blocks.0.attn.qkv.weight", "b.bias")
    table = ParamTable(names, {"update_ratio": ratios})
    made = make_record(200)
    return replace(made, params=table, metrics={**made.metrics, "monitor/update_ratio_max": 1.2e-2})


def test_the_whole_line(record: Record) -> None:
    console, out = terminal(80, is_terminal=False)
    ConsoleSink(console, total_steps=300).record(record)
    whole = (
        "step:200/300 loss:2.1847 ema:2.30 update_ratio:3.1e-3 max:1.2e-2(blocks.0.attn.qkv) "
        "grad_norm:0.81 frozen:0 lr:1e-3 tok/s:12.3k 41ms/step monitor:0.03%"
    )
    assert record_line(record, 300).plain == whole
    assert printed(out) == whole + "\n"
    assert len(whole) < 160
    short = record_line(record, 300, width=len(whole) - 7).plain
    assert short == whole.replace("blocks.0.attn.qkv", "….attn.qkv")
    assert "attn" not in record_line(record, 300, width=len(whole) - 10).plain


@pytest.mark.parametrize("width", [40, 80, 100, 120, 140, 200])
def test_a_terminal_gets_one_line_of_whole_fields(record: Record, width: int) -> None:
    console, out = terminal(width)
    ConsoleSink(console, total_steps=300).record(record)
    line = printed(out).rstrip("\n")
    assert "\n" not in line
    assert len(line) <= width
    assert line.startswith("step:200/300 loss:2.1847")
    whole = record_line(record, 300).plain.split()
    assert all(field in whole for field in line.split() if not field.startswith("max:"))
    assert ("monitor:0.03%" in line) == (width >= 140)
    assert ("grad_norm:0.81" in line) == (width >= 80)


def test_unmeasured_metrics_are_omitted(record: Record) -> None:
    bare = replace(record, metrics={"train/step_loss": 1.0}, params=ParamTable((), {}))
    assert record_line(bare).plain == "step:200 loss:1.0000"
    assert record_line(replace(bare, metrics={}, applied=False)).plain == "step:200 skipped"


def test_values_that_are_not_finite_stand_out(record: Record) -> None:
    metrics = {
        **record.metrics,
        "train/step_loss": float("nan"),
        "monitor/grad_norm": float("inf"),
        "debug/nan_param_count": 3.0,
        "debug/inf_param_count": 0.0,
    }
    line = record_line(replace(record, metrics=metrics), width=60)
    red = {line.plain[span.start : span.end] for span in line.spans if span.style == "bold red"}
    assert red == {"loss:nan", "grad_norm:inf", "nan_params:3"}
    assert "inf_params" not in line.plain
    assert len(line.plain) <= 60


@pytest.mark.parametrize(
    ("tag", "value", "shown"),
    [
        ("train/step_loss", 0.00123, "loss:1.2e-3"),
        ("train/step_loss", 123456.0, "loss:1.2e5"),
        ("train/step_loss_ema", 0.5, "ema:0.5"),
        ("train/lr", 0.0, "lr:0"),
        ("performance/tokens_per_second", 999_970.0, "tok/s:1.0M"),
        ("performance/tokens_per_second", 950.0, "tok/s:950"),
        ("performance/step_seconds", 12.34, "12.3s/step"),
        ("performance/step_seconds", 0.0041, "4.1ms/step"),
        ("monitor/frozen_count", 4.0, "frozen:4"),
    ],
)
def test_numbers_are_short(record: Record, tag: str, value: float, shown: str) -> None:
    line = record_line(replace(record, metrics={tag: value}, params=ParamTable((), {})))
    assert line.plain == f"step:200 {shown}"


def test_faults_get_a_line_each(record: Record) -> None:
    console, out = terminal(60)
    ConsoleSink(console).record(replace(record, faults=("rank 1 [x] " + "y" * 80, "rank 2")))
    lines = printed(out).splitlines()
    assert lines[1:] == [
        "  fault at step 200: rank 1 [x] " + "y" * 80,
        "  fault at step 200: rank 2",
    ]


def test_an_alert_is_a_panel_with_numbered_advice() -> None:
    console, out = terminal(80)
    ConsoleSink(console).alert(ALERT)
    text = printed(out)
    lines = text.splitlines()
    assert "WARNING frozen at step 60" in lines[0]
    assert {len(line) for line in lines} == {80}
    assert "2 parameters did not move for 3 observations" in text
    assert "blocks.4.attn.qkv.weight and 2 more" in " ".join(text.replace("│", "").split())
    assert "ranks: 0, 3" in text
    assert "1. Check that the optimizer holds [them]." in text
    assert "2. Raise the learning rate" in text
    console, out = terminal(200)
    ConsoleSink(console).alert(ALERT)
    assert {len(line) for line in printed(out).splitlines()} == {100}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"monitor/grad_norm": 2.0, "monitor/grad_norm_stderr": 0.02}, "grad_norm:2.00"),
        ({"monitor/grad_norm": 2.0, "monitor/grad_norm_stderr": 0.1}, "grad_norm:2.00±5%"),
        (
            {
                "monitor/grad_norm": 3.0,
                "train/unclipped_grad_norm": 3.0,
                "monitor/applied_grad_norm": 1.0,
            },
            "grad_norm:3.00(clipped 1.00)",
        ),
    ],
)
def test_the_gradient_norm_shows_its_error_and_the_clipped_norm(
    record: Record, metrics: dict[str, float], shown: str
) -> None:
    line = record_line(replace(record, metrics=metrics, params=ParamTable((), {})))
    assert line.plain == f"step:200 {shown}"


def test_the_second_model_of_a_script_is_named(record: Record) -> None:
    lines = io.StringIO()
    sink = ConsoleSink(Console(file=lines, width=80), label="model2")
    sink.record(record)
    sink.alert(Alert("frozen", "warning", 200, "w did not move"))
    first, title, *_ = lines.getvalue().splitlines()
    assert first.startswith("model2 step:200 ")
    assert len(first) <= LOG_WIDTH
    assert "frozen at step 200 of model2" in title
    assert model_label(Path("runs/gan-model2")) == "model2"
    assert model_label(Path("runs/gan")) == model_label(Path("runs/my-model")) == ""
    assert model_label(run_path_of_model(Path("runs/gan"), 3)) == "model3"
