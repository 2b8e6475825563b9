"""`distmon verify` on the command line: tables and exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distmon.cli import main
from distmon.verify import rank_processes
from distmon.verify.parallelisms import PARALLELISMS

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Result:
    """Exit code and output of the command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Result]


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process; its ranks still are separate processes."""
    monkeypatch.syspath_prepend(str(HERE))

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["distmon", "verify", *arguments])
        with pytest.raises(SystemExit) as leaving:
            main.run()
        code = leaving.value.code
        return Result(int(code or 0), *capsys.readouterr())

    return call


def _row(output: str, name: str) -> list[str]:
    rows = [line.split() for line in output.splitlines()]
    (row,) = [r for r in rows if r[:1] == [name] and r[-1] in ("ok", "off", "failed", "skipped")]
    return row


def test_right_ones_exit_0_with_a_table() -> None:
    """Run as a real command, with models imported from the current directory."""
    command = [sys.executable, "-m", "distmon.cli.main", "verify", "--ranks", "2", "--steps", "4"]
    command += ["--parallel", "ddp,zero-redundancy,hsdp"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, cwd=HERE
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    for name in ("ddp", "zero-redundancy"):
        row = _row(result.stdout, name)
        weights, gradients, updates = (float(x) for x in row[1:4])
        assert weights < 1e-6 > updates
        assert gradients < 1e-5
        assert (row[6], row[-1], row[-3]) == ("0", "ok", "2")
        assert row[-4] == "2.00"
    assert _row(result.stdout, "hsdp") == ["hsdp", "skipped"]
    assert "skipped hsdp: needs at least 4 ranks" in result.stdout
    assert result.stdout.splitlines()[-1] == "2 right, 1 skipped, 0 off"


def test_models_of_the_user(verify: Command) -> None:
    """An nn.Sequential runs as a pipeline; tensor parallelism without a plan is skipped."""
    result = verify("--model", "verify_models:sequence", "--parallel", "fsdp,tp,pp")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped tp: the model has no attribute tensor_parallel_plan" in result.stdout
    assert result.stdout.splitlines()[-1] == "2 right, 1 skipped, 0 off"
    result = verify("--model", "verify_models:tied", "--parallel", "plain,ddp,fsdp,fsdp1-full*,pp")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "only an nn.Sequential can be split into pipeline stages" in result.stdout
    assert result.stdout.splitlines()[-1] == "5 right, 1 skipped, 0 off"
    result = verify("--model", "verify_models:key_bias", "--parallel", "ddp,fsdp")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the gradient is zero except for rounding: k.bias" in result.stdout


def test_a_model_that_differs_by_rank_is_off_and_its_parameter_named(verify: Command) -> None:
    result = verify("--model", "verify_models:differs_by_rank", "--parallel", "plain,ddp,fsdp")
    assert result.returncode == 1, result.stdout + result.stderr
    assert _row(result.stdout, "plain")[-1] == "ok"
    assert _row(result.stdout, "ddp")[-1] == "off"
    assert "ddp: columns beyond their limit" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "grad_norm " in line]
    assert any(".weight" in line or ".bias" in line for line in lines)
    assert result.stdout.splitlines()[-1] == "1 right, 0 skipped, 2 off: ddp, fsdp"


def test_a_failed_rank_is_reported_at_once_and_the_next_parallelism_runs(
    verify: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unlucky.py").write_text(
        "import verify_models\n"
        f"def factory(): return verify_models.fails_once({str(tmp_path / 'marker')!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rank_processes, "GROUP_TIMEOUT_S", 900)
    begin = time.monotonic()
    result = verify("--model", "unlucky:factory", "--parallel", "ddp,ddp-bucket-view")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ddp failed: rank 1: RuntimeError: out of luck" in result.stdout
    assert _row(result.stdout, "ddp") == ["ddp", "failed"]
    assert _row(result.stdout, "ddp-bucket-view")[-1] == "ok"
    assert time.monotonic() - begin < 600  # without waiting for the timeout of the process group


def test_a_dead_process_is_reported_with_its_last_output(verify: Command) -> None:
    result = verify("--model", "verify_models:dies", "--parallel", "ddp")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ddp failed: rank 0: died with exit code 7" in result.stdout
    assert "last line of stderr" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parallel", "ddp,fsdb"], 'unknown configuration "fsdb" in --parallel; did you mean'),
        (["--parallel", "zzz"], "valid names are ddp, ddp-accumulate"),
        (["--parallel", " , "], "--parallel names no configuration"),
        (["--ranks", "1"], "--ranks must be at least 2, not 1"),
        (["--steps", "1"], "--steps must be at least 2, not 1"),
        (["--ranks", "3"], "the global batch has 16 rows, which 3 ranks cannot share equally"),
        (["--model", "verify_models"], '--model must be "module:factory", not "verify_models"'),
        (["--model", "no_such:thing"], 'cannot import "no_such" of --model: No module named'),
        (["--model", "verify_models:nothing"], '"verify_models" has no function "nothing"'),
        (["--model", "verify_models:not_a_function"], 'has no function "not_a_function"'),
        (["--model", "verify_models:no_tuple"], "must return (model, batch) or"),
        (["--model", "verify_models:no_model"], "is a str, not a Module"),
        (["--model", "verify_models:raises"], "raises() raises ValueError: no such dataset"),
        (["--model", "verify_models:odd_rows"], "has 7 rows, which 2 ranks cannot share"),
        (["--model", "verify_models:wrong_shape"], "the unsharded model cannot be trained"),
    ],
)
def test_bad_options_print_one_sentence_and_exit_with_2(
    arguments: list[str], sentence: str, verify: Command
) -> None:
    result = verify(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_list_of_configurations(verify: Command) -> None:
    result = verify("--list")
    assert result.returncode == 0
    for parallelism in PARALLELISMS.values():
        assert parallelism.name in result.stdout
        assert parallelism.summary in result.stdout
