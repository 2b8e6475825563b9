"""`attach`: what goes wrong is one sentence, and nothing is left behind."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import quiet, small_model

import distmon
from distmon.errors import PlanMismatchError


class _Picky(torch.nn.Module):
    """A module that takes forward pre-hooks, but may take no forward hooks."""

    def __init__(self, *inner: torch.nn.Module, takes_hooks: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(inner)
        self._takes_hooks = takes_hooks

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        if not self._takes_hooks:
            raise RuntimeError("no forward hooks here")
        return super().register_forward_hook(*args, **kwargs)


class _NoPostHooks(torch.optim.SGD):
    """As an optimizer wrapper that does not take all hooks: the failure comes late."""

    def register_step_post_hook(self, hook: Any) -> Any:  # noqa: ARG002
        raise RuntimeError("no post hooks here")


def _traces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Everything that an attached monitor holds on to."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("distmon")),
        "files": sorted(os.listdir("/proc/self/fd")),
        "module hooks": [len(getattr(m, name)) for m in model.modules() for name in hooks],
        "gradient hooks": [bool(p._post_accumulate_grad_hooks) for p in model.parameters()],
        "optimizer hooks": [*optimizer._optimizer_step_pre_hooks],
        "optimizer post hooks": [*optimizer._optimizer_step_post_hooks],
    }


def _nothing_left(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, object]
) -> bool:
    """Wait until all is as before; on a busy machine it was not, right after the error."""
    deadline = time.monotonic() + 40
    while _traces(model, optimizer) != before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


def _settings(what: str, folder: Path) -> dict[str, Any]:
    """Keyword arguments of `attach` that fail at a later and later point."""
    blocked = folder / "file"
    blocked.write_text("x")
    sinks = ["jsonl", "arrow", "console"]
    return {
        "config": {"intervall": 3},
        "rules": {"rules": {"frozzen": {}}},
        "actions": {"actions": {"stop": ["nonfinit"]}},
        "include": {"include": ["nothing*"]},
        "blocks": {"flow": {"blocks": ["nothing*"]}},
        "folder": {"run_dir": blocked, "strict": True},
        "notify": {"notify": {"urls": ["nothing://x"]}},
        "package": {"sinks": [*sinks, "tensorboard"]},
        "optimizer": {"sinks": sinks, "run_dir": folder / "run"},
        "no optimizer": {"sinks": sinks, "run_dir": folder / "run"},
        "optimizer hooks": {"sinks": sinks, "run_dir": folder / "run"},
        "block hooks": {"sinks": sinks, "run_dir": folder / "run"},
        "model hooks": {"sinks": sinks, "run_dir": folder / "run"},
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        *("config", "rules", "actions", "include", "blocks", "folder", "notify", "package"),
        *("optimizer", "no optimizer", "optimizer hooks", "block hooks", "model hooks"),
    ],
)
def test_a_failed_attach_leaves_nothing_behind(
    model: torch.nn.Module, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    observed = model
    if what in ("block hooks", "model hooks"):
        blocks = [_Picky(takes_hooks=True), _Picky(takes_hooks=what == "model hooks")]
        observed = _Picky(*blocks, takes_hooks=False)
    kind = _NoPostHooks if what == "optimizer hooks" else torch.optim.SGD
    trained = small_model() if what == "optimizer" else observed
    optimizer = kind(trained.parameters(), lr=0.1)
    passed: Any = "SGD" if what == "no optimizer" else optimizer
    settings = {"run_dir": tmp_path / "run", **_settings(what, tmp_path)}
    before = _traces(observed, optimizer)
    with pytest.raises(RuntimeError if what.endswith(" hooks") else distmon.DistmonError) as caught:
        distmon.attach(observed, passed, **settings)
    assert "\n" not in str(caught.value)
    assert _traces(observed, optimizer) == before


def test_a_closed_monitor_leaves_nothing_behind(model: torch.nn.Module, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _traces(model, optimizer)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path))
    optimizer.step()
    monitor.step(loss=1.0)
    assert _traces(model, optimizer) != before
    monitor.close()
    assert _traces(model, optimizer) == before


def _differ(rank: int, _: int, folder: str) -> dict[str, str]:
    """What every rank raises when rank 1 has other settings, or settings that cannot be read."""
    found = {}
    backends, new_group = [], dist.new_group
    dist.new_group = lambda **given: backends.append(given["backend"]) or new_group(**given)
    for what, settings, environment in (
        ("enabled", {"enabled": False}, {}),
        ("transport", {"transport": "device"}, {}),
        ("infinite", {"timeout_s": float("inf")}, {}),
        ("environment", {}, {"DISTMON_RULES": "1", "DISTMON_RULES__X": "2"}),
    ):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {**quiet(Path(folder)), **(settings if rank else {})}
        os.environ |= environment if rank else {}
        try:
            distmon.attach(model, optimizer, **given).close()
        except distmon.DistmonError as error:
            found[what] = str(error)
        found[f"groups of {what}"] = str(backends)
        backends.clear()
        for name in environment:
            os.environ.pop(name, None)
    disabled = distmon.attach(small_model(), enabled=False)
    assert not disabled.enabled
    return found


def test_ranks_that_differ_or_fail_are_named_on_every_rank_at_once(tmp_path: Path) -> None:
    # Not strict, which sets `transport: device` for all ranks: here they differ in it.
    first, second = run_ranks(_differ, 2, str(tmp_path), strict=False)
    for found in (first, second):
        assert "enabled (True on rank 0; False on rank 1)" in found["enabled"]
        assert "transport: device (False on rank 0; True on rank 1)" in found["transport"]
        # Ranks that differ create no group whose kind depends on it: some would wait for others.
        assert found["groups of transport"] == "['gloo']"
    assert 'for "timeout_s"' in second["infinite"]
    assert "DISTMON_RULES" in second["environment"]
    for what in ("infinite", "environment"):
        assert first[what] == "rank 1 failed to attach; its own message says why"


def test_an_unusable_run_folder_does_not_end_the_job(
    model: torch.nn.Module, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "file").write_text("x")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path / "file")) as monitor:
        optimizer.step()
        monitor.step(loss=1.0)
    (instead,) = re.findall(r"writing this run to (\S+) instead", caplog.text)
    assert [r["step"] for r in distmon.read_run(instead).records] == [1]


def test_a_package_without_metadata_attaches(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "distmon":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    found = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    distmon.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **quiet(tmp_path)).close()
    versions = distmon.read_run(tmp_path / "run").info["versions"]
    assert versions["torch"] == torch.__version__
    assert "distmon" not in versions


WRONG_ON_RANK_1: dict[str, dict[str, Any]] = {
    "config": {"intervall": 3},
    "include": {"include": ["nothing*"]},
    "agreement": {"seed": 7},
    "optimizer": {},
    "hooks": {},
}


def _fail_on_one_rank(rank: int, _: int, folder: str) -> dict[str, tuple[str, bool]]:
    """Rank 1 cannot attach; what every rank raises, and whether anything is left behind."""
    found = {}
    for what, settings in WRONG_ON_RANK_1.items():
        model = small_model()
        trained = small_model() if rank and what == "optimizer" else model
        kind = _NoPostHooks if rank and what == "hooks" else torch.optim.SGD
        optimizer = kind(trained.parameters(), lr=0.1)
        before = _traces(model, optimizer)
        given = {**quiet(Path(folder)), **(settings if rank else {})}
        try:
            distmon.attach(model, optimizer, **given).close()
        except (distmon.DistmonError, RuntimeError) as error:
            sentence = f"{type(error).__name__}: {error}"
            found[what] = (sentence, _nothing_left(model, optimizer, before))
    return found


def test_whatever_is_wrong_on_one_rank_all_ranks_raise_and_leave_nothing(tmp_path: Path) -> None:
    # A communicator of the strict group keeps its sockets: no rank may destroy it alone.
    first, second = run_ranks(_fail_on_one_rank, 2, str(tmp_path), strict=False)
    sentence = f"{PlanMismatchError.__name__}: rank 1 failed to attach; its own message says why"
    assert second["hooks"][0] == "RuntimeError: no post hooks here"
    for what in ("config", "include", "optimizer", "hooks"):
        assert first[what] == (sentence, True)
    assert 'unknown key "intervall"' in second["config"][0]
    assert "nothing*" in second["include"][0]
    assert "none of the 6 tensors" in second["optimizer"][0]
    for found in (first, second):
        assert "rank 1 has different settings from rank 0" in found["agreement"][0]
        assert all(nothing_left for _, nothing_left in found.values()), found
