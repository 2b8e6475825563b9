"""Scripts that know nothing of distmon, started through it: only the JSON is changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import distmon

EXAMPLE = Path(distmon.__file__).parents[1] / "examples" / "deepspeed_plain"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"],
    # One rank: what differs is how the script's arguments arrive.
    "deepspeed": ["deepspeed", "--num_gpus", "1", "--master_port", "{port}", "--module"],
}


def start(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose `{port}` is a free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return subprocess.run(
        [part.replace("{port}", port) for part in command],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "MASTER_PORT": port,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def example_config(folder: Path, **keys: Any) -> Path:
    """The example's own config with the block changed."""
    config = json.loads((EXAMPLE / "ds_config_monitored.json").read_text())
    config["distmon"] |= {"run_dir": str(folder / "run"), "interval": 2, **keys}
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


def test_the_example_differs_from_the_plain_one_by_the_block_only() -> None:
    plain = json.loads((EXAMPLE / "ds_config.json").read_text())
    monitored = json.loads((EXAMPLE / "ds_config_monitored.json").read_text())
    assert monitored.pop("distmon")["enabled"] is True
    assert monitored == plain
    assert "distmon" not in (EXAMPLE / "train.py").read_text().split('"""', 2)[2]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_is_watched_without_an_edit(launcher: str, tmp_path: Path) -> None:
    config = example_config(tmp_path)
    script = [str(EXAMPLE / "train.py"), "--deepspeed", "--deepspeed_config", str(config)]
    own = ["distmon.deepspeed", "--skip-builds", *script, "--max-steps", "4", "--log-interval", "2"]
    done = start([*LAUNCHERS[launcher], *own], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 4 loss" in done.stdout
    run = distmon.read_run(tmp_path / "run")
    assert [record["step"] for record in run.records] == [2, 4]
    assert run.records[-1]["world_size"] == (2 if launcher == "torchrun" else 1)
    assert "blocks.1.linear2.weight" in {row["name"] for row in run.info["parameters"]}


def test_typo_stops_at_the_start_with_one_sentence(tmp_path: Path) -> None:
    config = example_config(tmp_path, intervall=5)
    own = ["--skip-builds", str(EXAMPLE / "train.py"), "--deepspeed_config", str(config)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = start([sys.executable, "-m", "distmon.deepspeed", *own], tmp_path, **alone)
    assert done.returncode == 2, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith('unknown key "intervall"')
    assert 'did you mean "interval"?' in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [([], "no script to run"), (["no.py"], "there is no script no.py"), (["--x"], "option --x")],
)
def test_wrong_command_line_is_explained(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from distmon.integrations.deepspeed.run_script import main

    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra hf")
def test_hugging_face_trainer_with_the_block_in_its_config(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "distmon": {"interval": 1, "run_dir": str(tmp_path / "run"), "sinks": ["jsonl"]},
    }
    path, log = tmp_path / "ds.json", tmp_path / "log.json"
    path.write_text(json.dumps(config))
    script = [str(Path(__file__).with_name("hf_script.py")), str(path), str(tmp_path), str(log)]
    own = ["distmon.deepspeed", "--skip-builds", *script]
    done = start([*LAUNCHERS["torchrun"], *own], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [entry for entry in json.loads(log.read_text()) if "loss" in entry]
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [entry["step"] for entry in told] == [1, 2, 3, 4]
    for record, entry in zip(run.records, told, strict=True):
        metrics = record["metrics"]
        assert run.losses[record["step"]] == pytest.approx(entry["loss"], rel=1e-5)
        assert metrics["train/unclipped_grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
    assert run.info["parameters"][0]["name"] == "transformer.wte.weight"
