from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_training import TINY_MATRICES, contender

from distmon_benchmarks import interleaved
from distmon_benchmarks.contenders import Session, find
from distmon_benchmarks.overhead import Plan, read_plan, run
from distmon_benchmarks.results import read
from distmon_benchmarks.workloads import WORKLOADS, find_workloads


def test_a_run_says_what_it_measured_and_what_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved, "settle", lambda: 0.0)
    huge = replace(TINY_MATRICES, name="huge", elements=10**15)
    plan = Plan(
        cases=[(TINY_MATRICES, "fp32"), (TINY_MATRICES, "bf16"), (huge, "fp32")],
        contenders=[
            *find(["none", "distmon sampled", "wandb.watch"]),
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
    fp32, bf16 = results.cases()
    assert (fp32.dtype, bf16.dtype) == ("fp32", "bf16")
    assert (fp32.tensors, fp32.elements) == (10, 10 * 16 * 16)
    # A workload for growth leaves out those of whom nobody asks how they grow.
    assert results.contenders(fp32) == ["none", "distmon sampled"]
    assert len(results.values(bf16, "distmon sampled", "observation")) == 3
    context = results.context
    assert context.skipped == {"absent": "surely_absent is not installed: pip install it"}
    assert context.skipped_workloads["huge fp32"].startswith("needs about 28000000 GB of memory")
    assert context.wrong == {}
    assert context.conditions["matrices"] == "10 matrices"
    assert context.cores >= 1
    assert context.versions["torch"]


def test_the_sizes_of_a_run() -> None:
    quick, out = read_plan([])
    assert out == Path("runs/bench")
    assert ("gpt2", "fp32") in [(w.name, d) for w, d in quick.cases]
    assert "llama-1b" not in [w.name for w, _ in quick.cases]
    assert (quick.ranks, quick.parallel) == ([1, 2], ["ddp"])
    full, _ = read_plan(["--full"])
    assert len(full.cases) == 2 * len(WORKLOADS)
    assert (full.ranks, full.parallel) == ([1, 2, 4], ["ddp", "fsdp2"])
    some, _ = read_plan(["--workloads", "moe", "--contenders", "naive clone", "--rounds", "3"])
    assert [(w.name, d) for w, d in some.cases] == [("moe", "fp32")]
    assert [c.name for c in some.contenders] == ["none", "naive clone"]
    assert (some.rounds, some.ranks) == (3, [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workloads", "gpt3"], "there is no workload gpt3; there are gpt2, "),
        (["--contenders", "me"], "there is no contender me; there are none, "),
        (["--dtypes", "fp8"], "there is no dtype fp8; there are fp32, bf16"),
        (["--rounds", "1"], "--rounds must be at least 2, not 1"),
        (["--ranks", "two"], "--ranks must be numbers with commas, not two"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read_plan(arguments)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


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
