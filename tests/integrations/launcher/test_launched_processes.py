"""`distmon run` starts a script as plain Python does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from started_scripts import DISTMON_RUN, ROOT, finish, records, run, start

from distmon.errors import ConfigError
from distmon.integrations.launcher.command import VARIABLE, split

SCRIPT = """
import os, sys
print(sys.warnoptions, __name__, __file__, sys.argv)
print(sorted(k for k in sys.modules if k.startswith("distmon")))
print([p for p in sys.path if "bootstrap" in p], "RANK" in os.environ, os.environ["MINE"])
import torch
from torch.utils.data import DataLoader

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((4,), float(i))

def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    # Processes that do not train get nothing of distmon.
    print([name for name in sys.modules if name.startswith("distmon")])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    losses = []
    for x in DataLoader(Noisy(), batch_size=4, num_workers=1):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss
        optimizer.step(closure)
    print("first loss", losses[0])
    # What a training starts is left alone.
    import subprocess
    command = [sys.executable, "-c", "import os; print([k for k in os.environ if 'DISTMON' in k])"]
    print(subprocess.run(command, capture_output=True, text=True).stdout, os.environ["PYTHONPATH"])
    raise ValueError("my own mistake")

if __name__ == "__main__":
    main()
"""


def test_output_exit_code_and_traceback_are_those_of_python(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import os; os.environ['MINE'] = 'kept'")
    script = tmp_path / "train me.py"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": str(tmp_path / "site")}
    python = [sys.executable, "-W", "ignore::ImportWarning"]
    arguments = [str(script), "--monitor", "-m", "--distmon.interval", "3"]
    plain = start([*python, *arguments], tmp_path, **path)
    options = ["--distmon.interval", "1", "--distmon.run_dir", "run"]
    watched = run([*python, *DISTMON_RUN[1:], *options, *arguments], tmp_path, **path)
    expected = finish(plain)
    assert (watched.code, watched.out) == (1, expected.out)
    traceback = r"Traceback \(most.*my own mistake\n"
    (found_traceback,) = re.findall(traceback, watched.err, re.S)
    assert [found_traceback] == re.findall(traceback, expected.err, re.S)
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == [1, 2], "closed by the exception as well"
    (first,) = re.findall(r"first loss (\S+)", watched.out)
    assert found[0]["metrics"]["train/step_loss"] == pytest.approx(float(first), rel=1e-6)


MODULE = """
import sys, torch, distmon
from .model import model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--own" in sys.argv:
    distmon.attach(model, optimizer, interval=1, run_dir="own", sinks=["jsonl"])
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(7)
"""


def test_a_module_with_exit_code_and_a_script_that_attaches_itself(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text(MODULE)
    (tmp_path / "pkg/model.py").write_text("import torch; model = torch.nn.Linear(4, 1)")
    settings = ["--distmon.interval=1", "--distmon.sinks=jsonl"]
    # Any program may start the script, here Python itself.
    program = [sys.executable, "-m", "pkg.train", "--own"]
    own = start([*DISTMON_RUN, *settings, *program], tmp_path)
    watched = run([*DISTMON_RUN, *settings, "-m", "pkg.train"], tmp_path)
    assert watched.code == 7, watched.err
    assert [record["step"] for record in records(tmp_path / "runs/latest")] == [1, 2, 3]
    assert finish(own).code == 7
    assert len(os.listdir(tmp_path / "runs")) == 2, "one run and the link to it"


def test_a_script_that_ends_before_it_trains(tmp_path: Path) -> None:
    lines = ("import torch", "o = torch.optim.SGD(torch.nn.Linear(4, 1).parameters())", "1 / 0")
    (tmp_path / "train.py").write_text("\n".join(lines))
    watched = run([*DISTMON_RUN, "train.py"], tmp_path)
    assert "no monitor was attached: the script ended before the first step of SGD" in watched.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("ranks", [(), ("--standalone", "--nproc-per-node", "2")])
def test_a_script_without_an_optimizer(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """A spawned child that has none either says nothing."""
    lines = (
        "import multiprocessing, torch",
        "if __name__ == '__main__':",
        "    child = multiprocessing.get_context('spawn').Process(target=print)",
        "    child.start()",
        "    child.join()",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    watched = run([*DISTMON_RUN, *ranks, "train.py"], tmp_path)
    assert watched.code == 0, watched.err
    assert watched.err.count("distmon: this process created no torch optimizer") == 1
    (tmp_path / "train.py").write_text("raise ValueError('my own mistake')")
    assert "optimizer" not in run([*DISTMON_RUN, *ranks, "train.py"], tmp_path).err


def test_the_command_line_is_taken_apart_without_abbreviations() -> None:
    options = ["--nproc-per-node", "2", "--distmon.rules.frozen.patience=2", "--standalone"]
    script = ["launch/train.py", "--monitor", "--distmon.interval", "5"]
    command = split([*options, *script])
    assert command.launcher == ["--nproc-per-node", "2", "--standalone"]
    assert command.settings == {"rules": {"frozen": {"patience": 2}}}
    assert command.script == script
    command = split(["--distmon.budget", "1e-3", "-m", "pkg.train", "-m"])
    assert (command.settings, command.is_module) == ({"budget": 1e-3}, True)
    assert command.script == ["pkg.train", "-m"]
    # A date is text: no setting is one, and settings travel to the processes as JSON.
    command = split(["--distmon.wandb.name", "2024-05-01", "train.py"])
    assert command.settings == {"wandb": {"name": "2024-05-01"}}
    for wrong, words in (
        (["--monitor", "train.py"], "has no option --monitor"),
        (["--standalone"], "needs a script"),
        (["--distmon.interval"], "needs a value"),
    ):
        with pytest.raises(ConfigError, match=words):
            split(wrong)


def test_torch_is_not_imported_where_no_option_is_one_of_torchrun(tmp_path: Path) -> None:
    """The process of the script imports it, and its start would take twice as long."""
    code = (
        "import sys\n"
        "from distmon.cli import main\n"
        "sys.argv = ['distmon', 'run', '--distmon.interval', '5', 'nothing.py']\n"
        "try: main.run()\n"
        "except SystemExit: print('torch' in sys.modules)\n"
    )
    ended = run([sys.executable, "-c", code], tmp_path)
    assert "there is no script nothing.py" in ended.err
    assert ended.out.split() == ["False"]


def test_a_mistake_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    from distmon.integrations.launcher.command import run as start_training

    with pytest.raises(ConfigError, match='did you mean "interval"'):
        start_training(["--distmon.intervall", "3", str(ROOT / "launch/train.py")])
    with pytest.raises(ConfigError, match='did you mean "frozen"'):
        start_training(["--distmon.rules.frozn.patience", "3", str(ROOT / "launch/train.py")])
    with pytest.raises(ConfigError, match=r"there is no script .*nothing.py$"):
        start_training([str(tmp_path / "nothing.py")])
    with pytest.raises(ConfigError, match=r"no script pkg.train; for a module: distmon run -m pkg"):
        start_training(["pkg.train"])


def test_ranks_of_a_module_and_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from distmon.integrations.launcher.command import run as start_training

    given: list[Any] = []
    failure = ProcessFailure(local_rank=1, pid=999999, exitcode=1, error_file="")

    def fail(options: Any) -> None:
        given.append(options)
        raise ChildFailedError(options.training_script, {1: failure})

    for name in (VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(torchrun, "run", fail)
    with pytest.raises(SystemExit) as end:
        start_training(["-m", "--nproc-per-node", "2", "pkg.train", "-m", "fit", "--monitor"])
    (options,) = given
    assert (options.module, options.nproc_per_node) == (True, "2")
    assert options.training_script == "pkg.train"
    assert options.training_script_args == ["-m", "fit", "--monitor"]
    assert end.value.code == 1
    printed = capsys.readouterr().err
    assert "pkg.train FAILED" in printed
    assert "rank      : 1" in printed or "local_rank: 1" in printed
    assert "Traceback" not in printed
