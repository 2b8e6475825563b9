"""Runs the trainer many times in one set of ranks, because starting ranks takes longer than runs.

As a script, on ranks: `trainer_cases.py CASES RESULTS`, two JSON files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from trainer_process import ROOT, TINY, forked, losses


@dataclass(frozen=True)
class Case:
    """How one run of the trainer went, as rank 0 saw it."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return losses(self.out)

    @property
    def validation(self) -> list[float]:
        """Validation losses in order."""
        return [float(text) for text in re.findall(r" val_loss:(\S+)", self.out)]


def run_cases(folder: Path, ranks: int, cases: dict[str, list[str]]) -> dict[str, Case]:
    """Run the trainer with each list of arguments, one after the other, on the same ranks.

    Arguments win over the tiny defaults; `ranks=0` is without a process group.
    """
    asked, answered = folder / f"cases-{ranks}.json", folder / f"results-{ranks}.json"
    asked.write_text(json.dumps({name: [*TINY, *each] for name, each in cases.items()}))
    # A writer process for each case would take longer than the case.
    script = [__file__, str(asked), str(answered)]
    result = forked(*script, folder=folder, ranks=ranks, DISTMON_WRITER="thread")
    assert result.returncode == 0, result.stderr
    return {name: Case(**each) for name, each in json.loads(answered.read_text()).items()}


def run_all(asked: Path, answered: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from launch.ranks import join_ranks
    from launch.train import run

    ranks, results = join_ranks(), {}
    for name, arguments in json.loads(asked.read_text()).items():
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: object = run(arguments, ranks)
            except SystemExit as leaving:
                code = leaving.code
            except Exception as error:
                # The other ranks may wait for this one for ever: end them all.
                traceback.print_exc(file=sys.__stderr__)
                raise SystemExit(1) from error
        results[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
    if ranks.is_main:
        answered.write_text(json.dumps(results))
    ranks.leave()
    # One left behind aborts the process now and then while Python shuts down.
    assert not _gloo_threads(), "threads of the process group outlive it"


def _gloo_threads() -> list[str]:
    """Names of the process group's threads, where the system lists them."""
    names = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            names.append(Path(task, "comm").read_text())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
