from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_training import TINY_MATRICES, contender

from benchmarks.contenders import CONTENDERS
from benchmarks.overhead.command import parse, read_plan
from benchmarks.overhead.plan import Plan, run
from benchmarks.overhead.workloads import WORKLOADS, find_workloads
from distmon.bench.contender import Session, find
from distmon.bench.results import read


def test_a_run_reports_what_it_measured_and_what_not(tmp_path: Path) -> None:
    huge = replace(TINY_MATRICES, name="huge", elements=10**15)
    plan = Plan(
        cases=[(TINY_MATRICES, "fp32"), (TINY_MATRICES, "bf16"), (huge, "fp32")],
        contenders=[
            *find(["none", "distmon sampled", "wandb.watch"], CONTENDERS),
            contender("absent", Session(), package="surely_absent", install="pip install it"),
        ],
        rounds=3,
        limit_s=1.0,
        ranks=[],
        parallel=[],
        full=False,
    )
    run(plan, tmp_path, Console(quiet=True))
    results = read(tmp_path)
    fp32, bf16 = results.cases
    assert (fp32.dtype, bf16.dtype) == ("fp32", "bf16")
    assert (fp32.tensors, fp32.elements) == (10, 10 * 16 * 16)
    assert fp32.conditions == "10 matrices, fused AdamW"
    # A workload for growth is without those that are not asked how they grow.
    assert results.contenders == ["distmon sampled"]
    assert len(results.values(fp32, "none", "step")) == 3
    assert len(results.values(bf16, "distmon sampled", "observation")) == 3
    skipped = {(case.name, who): why for (case, who), why in results.notes("skipped").items()}
    why = "surely_absent is not installed: pip install it"
    assert skipped["matrices fp32", "absent"] == skipped["matrices bf16", "absent"] == why
    assert skipped["huge fp32", ""].startswith("needs about 28000000 GB of memory")
    assert results.wrong_answers == {}
    assert results.values(bf16, "distmon sampled", "answer") == [1.0]
    assert results.machine.cores >= 1
    assert "torch " in results.machine.versions


def _plan(*arguments: str) -> Plan:
    return read_plan(parse(arguments))


def test_the_sizes_of_a_run() -> None:
    quick = _plan()
    assert parse([]).out == Path("runs/bench")
    assert ("gpt2", "fp32") in [(w.name, d) for w, d in quick.cases]
    assert "llama-1b" not in [w.name for w, _ in quick.cases]
    assert (quick.ranks, quick.parallel) == ([1, 2], ["ddp"])
    full = _plan("--full")
    assert len(full.cases) == 2 * len(WORKLOADS)
    assert (full.ranks, full.parallel) == ([1, 2, 4], ["ddp", "fsdp2"])
    some = _plan("--workloads", "moe", "--contenders", "naive clone", "--rounds", "3")
    assert [(w.name, d) for w, d in some.cases] == [("moe", "fp32")]
    assert [c.name for c in some.contenders] == ["none", "naive clone"]
    assert (some.rounds, some.ranks) == (3, [])
    users = _plan("--model", "users_models:alone", "--batch", "4x6:50")
    assert [(w.name, d) for w, d in users.cases] == [("users_models:alone", "fp32")]
    assert "wandb.watch" in [c.name for c in users.contenders]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workloads", "gpt3"], "there is no workload gpt3; there are gpt2, "),
        (["--contenders", "me"], "there is no contender me; there are none, "),
        (["--dtypes", "fp8"], "there is no dtype fp8; there are fp32, bf16"),
        (["--model", "mine"], '--model must be "module:factory", not "mine"'),
        (["--rounds", "1"], "--rounds must be at least 2, not 1"),
        (["--ranks", "two"], "--ranks must be comma-separated numbers, not two"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _plan(*arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [("gpt2", 148, 124_439_808), ("llama-1b", 146, 1_235_814_400), ("moe", 536, 67_178_496)],
)
def test_models_have_the_shape_they_are_named_after(name: str, tensors: int, elements: int) -> None:
    (workload,) = find_workloads([name])
    with torch.device("meta"):
        sizes = [p.numel() for p in workload.build().parameters()]
    assert (len(sizes), sum(sizes)) == (tensors, elements)
    assert elements == pytest.approx(workload.elements, rel=0.01)
