"""`distmon bench`: a user's own model, from the factory to the files; mistakes are sentences."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from distmon.bench import measuring
from distmon.bench.results import read
from distmon.bench.user_model import Batch, UserModel
from distmon.cli.bench import run_benchmark
from distmon.cli.main import run
from distmon.errors import ConfigError


def _bench(tmp_path: Path, model: str, **options: Any) -> bool:
    settings: dict[str, Any] = {
        "batch": None,
        "contenders": "distmon sampled,naive clone",
        "rounds": 2,
        "limit": 5.0,
        "out": tmp_path / "out",
        **options,
    }
    with (tmp_path / "printed").open("w") as file:
        return run_benchmark(Console(width=140, file=file), f"users_models:{model}", **settings)


@pytest.mark.parametrize(("model", "batch"), [("with_step", None), ("alone", "4x6:50")])
def test_a_users_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, batch: str | None
) -> None:
    # Memory is measured in processes of their own, which take seconds to start.
    monkeypatch.setattr(measuring, "footprint", lambda *_: {"extra_memory": 4096.0})
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots have their own tests
    assert _bench(tmp_path, model, batch=batch)
    results = read(tmp_path / "out")
    (case,) = results.cases
    assert case.workload == f"users_models:{model}"
    assert case.tensors == {"with_step": 6, "alone": 3}[model]
    assert results.contenders == ["distmon sampled", "naive clone"]
    assert results.wrong_answers == {}
    for contender in results.contenders:
        assert len(results.values(case, contender, "observation")) == 2
    assert len(results.values(case, "none", "step")) == 2
    printed = (tmp_path / "printed").read_text()
    assert "4.00 KiB" in printed
    assert "plots need matplotlib" in printed
    assert "| naive clone | " in (tmp_path / "out" / "summary.md").read_text()


def test_another_process_can_be_given_the_model() -> None:
    users = UserModel("users_models:with_step", None)
    users.build()
    build, loss = pickle.loads(pickle.dumps((users.build, users.loss)))
    assert loss(build(), torch.device("cpu")).requires_grad


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nobody", 'has no function "nobody"'),
        ("returns_text", "must return a model, or (model, step)"),
        ("returns_three", "must return a model, or (model, step)"),
        ("step_is_none_of_its_kind", "must return a model, or (model, step)"),
        ("raises", "raises ValueError: no such checkpoint"),
        ("leaves", "raises SystemExit: 3"),
        ("alone", "returns a model alone: pass --batch"),
        ("nothing_to_learn", "no parameter that learns"),
        ("half", "must be all float32 or all bfloat16, not float16"),
        ("text_loss", "must return the loss"),
        ("constant_loss", "must return the loss"),
        ("vector_loss", "must return the loss"),
        ("nan_loss", "is nan in the first step"),
        ("wrong_shape", "raises RuntimeError: mat1 and mat2"),
    ],
)
def test_a_mistake_in_the_model_is_one_sentence(tmp_path: Path, model: str, words: str) -> None:
    batch = "4x2" if model in ("nothing_to_learn", "half") else None
    with pytest.raises(ConfigError) as caught:
        _bench(tmp_path, model, batch=batch)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 1}, "--rounds must be at least 2, not 1"),
        ({"limit": 0.0}, "--limit must be above 0 seconds, not 0"),
        ({"limit": float("nan")}, "--limit must be above 0"),
        ({"contenders": "distmon sampled,nobody"}, 'not "nobody"'),
        ({"contenders": " , "}, "--contenders must be of none, distmon sampled"),
        ({"batch": "4x2"}, "--batch is not used"),
        ({"batch": "4x-2"}, '--batch must be a shape such as "8x128"'),
        ({"batch": "0x2"}, '--batch must be a shape such as "8x128"'),
        ({"out": Path(__file__)}, "cannot write to --out"),
    ],
)
def test_a_mistake_in_the_options_is_one_sentence(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _bench(tmp_path, "with_step", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["", "mine", ":x", "mine:", "no_such_module:x", ".mine:x"])
def test_a_source_that_cannot_be_found_is_one_sentence(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        UserModel(source, None).build()
    assert "--model" in str(caught.value)


def test_a_module_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("def :")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match='cannot import "broken_module" of --model: SyntaxError'):
        UserModel("broken_module:x", None).build()


def test_a_batch_is_noise_or_integers() -> None:
    assert Batch.parse("8x128") == Batch((8, 128), None)
    assert Batch.parse("8:50257") == Batch((8,), 50257)


def test_the_command_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["distmon", "bench", "--model", "mine"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert capsys.readouterr().err == 'distmon: --model must be "module:factory", not "mine"\n'
