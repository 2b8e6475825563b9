"""Hostile files: one sentence or a partial result, in bounded time and memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from benchmarks.report.synthetic_run import write_run
from distmon.cli.show import print_run
from distmon.config import load_config
from distmon.errors import ConfigError, DistmonError, RunFolderError
from distmon.replay import LogError, load_rules, replay_run
from distmon.replay.run_folders import records_of_run
from distmon.report.view import build_view
from distmon.runs import params_file
from distmon.runs.open_run import open_run
from distmon.runs.reader import RunTail, read_run
from distmon.runs.run_folder import RunFolder
from distmon.sinks.arrow import ArrowSink
from distmon.sinks.jsonl import JsonlSink
from distmon.untrusted.terminal import SafeConsole, terminal

RUN = Path(__file__).parents[1] / "runs" / "nan-planted"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def shown(run: Path) -> str:
    text = io.StringIO()
    print_run(terminal(file=text, width=400), run, 3)
    return text.getvalue()


@pytest.mark.parametrize("name", ["records.jsonl", "alerts.jsonl", "params.arrow", "run.json"])
def test_a_pipe_a_device_and_a_link_are_named_and_not_read(run: Path, name: str) -> None:
    file = run / name
    ways = {
        "named pipe": lambda: os.mkfifo(file),
        "symbolic link": lambda: file.symlink_to("/dev/zero"),
        "directory": file.mkdir,
    }
    for what, make in ways.items():
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        make()
        if name == "run.json":
            with pytest.raises(RunFolderError, match=what):
                read_run(run)
        else:
            assert [problem for problem in read_run(run).problems if what in problem]
            assert what in shown(run)


@pytest.mark.parametrize("name", ["records.jsonl", "alerts.jsonl", "params.arrow", "run.json"])
def test_writers_do_not_follow_links(tmp_path: Path, name: str) -> None:
    """A link in a folder that others can write to must not make us write to its target."""
    target = tmp_path / "precious"
    target.write_text("{}")
    folder = RunFolder.open(tmp_path / "run", config={}, parameters=[])
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(target)
    if name == "run.json":
        folder.begin_attempt(resumed_from=0, world_size=1)
    else:
        JsonlSink(folder) if name.endswith("jsonl") else ArrowSink(folder)
    assert target.read_text() == "{}"
    assert (folder.path / name).is_file()
    assert not (folder.path / name).is_symlink()
    assert os.readlink(folder.path / f"{name}.aside-0") == str(target)  # removed is nothing


def test_a_huge_sparse_file_and_a_huge_line(run: Path) -> None:
    os.truncate(run / "records.jsonl", 1 << 40)
    os.truncate(run / "params.arrow", 1 << 40)
    found = read_run(run)
    assert found.records
    assert any("longer than 64 MiB" in problem for problem in found.problems)
    assert any("params.arrow ends in the middle" in problem for problem in found.problems)
    os.truncate(run / "run.json", 1 << 40)
    with pytest.raises(RunFolderError, match="larger than 256 MiB"):
        read_run(run)


def test_a_null_in_the_place_of_a_list(run: Path) -> None:
    lines = (run / "records.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"evaluations": None, "faults": None})
    (run / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert records_of_run(read_run(run))


def test_wrong_types_are_left_out_and_named(run: Path) -> None:
    lines = (run / "records.jsonl").read_text().splitlines()
    entry = json.loads(lines[0])
    entry["metrics"] |= {"train/lr": "fast", "train/step_loss": 10**400}
    entry |= {"ranks": [], "flow": {"blocks": ["a"], "input_norm": []}, "world_size": -1}
    entry |= {"evaluations": [{"step": 1}], "faults": 3, "loss_values": {"a": 1}}
    lines[0] = json.dumps(entry)
    lines[1] = json.dumps(json.loads(lines[1]) | {"step": "7"})
    (run / "records.jsonl").write_text("\n".join(lines) + "\n")
    (run / "alerts.jsonl").write_text('{"step": 3, "severity": "critical", "message": "x"}\n')
    info = json.loads((run / "run.json").read_text())
    info |= {"versions": {"torch": 2}, "parameters": [1, {"name": "w"}], "reading": {"text": 1}}
    (run / "run.json").write_text(json.dumps(info))
    problems = read_run(run).problems
    assert any("values of an unexpected type, ignored: metrics" in each or "world_size" in each
               for each in problems)  # fmt: skip
    assert any("records.jsonl has 1 broken line, skipped: line 2" in each for each in problems)
    assert any("alerts.jsonl has 1 broken line" in each for each in problems)
    assert any("run.json has 3 values" in each for each in problems)
    assert "alerts.jsonl has 1 broken line" in shown(run)
    assert len(replay_run(run).records) == len(lines) - 1
    build_view("run", RunTail(run).read())


def test_params_arrow_is_read_on_after_damage_in_its_middle(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12, 6)
    file = run / "params.arrow"
    whole = read_run(run).params.num_rows
    ends = [end for _, end in params_file.whole_messages(file)]
    content = bytearray(file.read_bytes())
    for kind in ("zeros", "removed", "inserted"):
        damaged = bytearray(content)
        if kind == "zeros":
            damaged[ends[1] : ends[1] + 50] = bytes(50)
        elif kind == "removed":
            del damaged[ends[1] + 20 : ends[1] + 29]
        else:
            damaged[ends[1] : ends[1]] = b"\xff\xff\xff\xff\x10\x00\x00\x00" * 3
        file.write_bytes(damaged)
        found = read_run(run)
        rows = whole // (len(ends) - 1)
        assert found.params.num_rows == whole - (0 if kind == "inserted" else rows), kind
        assert "params.arrow has 1 damaged entries, skipped" in found.problems
    folder = RunFolder.open(run, config={}, parameters=[])
    ArrowSink(folder).close()  # a new attempt keeps what follows the damage
    assert read_run(run).params.num_rows == whole


def test_a_batch_that_asks_for_more_than_its_file_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 200, 6)  # smaller batches are not compressed
    file = run / "params.arrow"
    ends = [end for _, end in params_file.whole_messages(file)]
    content = bytearray(file.read_bytes())
    # The uncompressed size is before the first buffer of the body of the first batch.
    at = content.index(b"\x28\xb5\x2f\xfd", ends[0]) - 8  # zstd's own mark
    content[at : at + 8] = struct.pack("<q", 1 << 60)
    file.write_bytes(content)
    assert "params.arrow has 1 damaged entries, skipped" in read_run(run).problems


def test_documents_that_explode(tmp_path: Path) -> None:
    aliases = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    merges = "a: &a {k: v}\n" + "".join(
        f"{b}: &{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    cases = {
        "bomb.yaml": (aliases, "more than 20000 values"),
        "merge.yaml": (merges, "more than 20000 values"),
        "self.yaml": ("a: &a [*a]", "contains itself"),
        "deep.yaml": ("[" * 5000, "nested"),
        "deep.json": ('{"a":' * 40_000, "nested too deeply"),
        "deep2.json": ('{"a":' * 200 + "1" + "}" * 200, "50 levels"),
        "large.json": ('{"interval": %s}' % ("9" * 401), "64 bits"),
        "hex.yaml": ("interval: 0x" + "f" * 9000, "64 bits"),
        "date.yaml": ("interval: 2001-99-99", "month must be"),
        "bytes.yaml": (b"\xff\xfe\x00", "not UTF-8"),
        "long.yaml": ("#" * (300 << 10), "larger than 256 KiB"),
        "surrogate.json": ('{"run_dir": "\\ud800"}', "valid Unicode"),
    }
    for name, (text, expected) in cases.items():
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        for read in (load_rules,) if name.startswith("surrogate") else (load_config,):
            with pytest.raises(ConfigError, match=expected):
                read(file)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="named pipe"):
        load_config(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="NUL"):
        load_config("a\x00b.yaml")


def test_a_small_event_file_that_asks_for_16_gib(tmp_path: Path) -> None:
    """As a length of the record, and as the shape of a tensor of one value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1 << 32)])
    tensor = TensorProto(dtype=1, tensor_shape=shape, float_val=[1.0])
    value = Summary.Value(tag="loss", tensor=tensor)
    value.metadata.plugin_data.plugin_name = "scalars"
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=1, summary=Summary(value=[value])))
    writer.close()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 200
    with pytest.raises(LogError, match="holds no scalars"):
        replay_run(tmp_path)
    file.write_bytes(struct.pack("<QI", 1 << 34, 0) + bytes(100))
    with pytest.raises(LogError, match="ends in the middle of an event"):
        replay_run(tmp_path)


def test_a_table_of_few_bytes_and_many_cells(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text(
        ",".join(["step", "loss", *(f"c{i}" for i in range(20_000))]) + "\n1,2" * 20_000
    )
    assert replay_run(file).observations == 1


def test_expressions_with_endless_numbers() -> None:
    for text in ("grad_norm > " + "9" * 401, "grad_norm > 1e999", "grad_norm ** " + "9" * 401):
        with pytest.raises(ConfigError):
            load_and_activate({"mine": {"when": text}})
    with pytest.raises(ConfigError, match="must be a number"):
        load_and_activate({"frozen": {"ratio": 10**400}})


def load_and_activate(rules: dict[str, object]) -> None:
    from distmon.replay.settings import activate, as_settings

    activate(as_settings(rules))


def test_a_run_dir_that_no_system_accepts(tmp_path: Path) -> None:
    for name in ("a\x00b", "x" * 5000):
        with pytest.raises(RunFolderError, match="cannot write the run folder"):
            open_run(tmp_path / name, True, {"config": {}, "parameters": []})
        with pytest.raises(DistmonError):
            read_run(tmp_path / name)


ATTACKS = (
    "\x1b[2J\x1b]0;x\x07",
    "[/nope]",
    "[bold",
    "\u202eevil",
    "\x9b31m",
    "a\rb",
    "[link=file:///]x",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_neither_escape_sequences_nor_markup_reach_the_terminal(run: Path, attack: str) -> None:
    alert = {"step": 3, "rule": attack, "severity": "info", "message": attack, "attempt": 0}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    hostile = run.rename(run.with_name(f"run{attack.replace('/', '_')}"))
    text = shown(hostile)
    assert not [char for char in text if ord(char) < 32 and char != "\n"]
    assert "\u202e" not in text
    assert "\x9b" not in text
    assert attack.startswith("\x1b") is ("\\x1b" in text)
    if attack.isprintable():
        assert attack in text


def test_every_console_is_a_safe_one() -> None:
    """A console of rich itself is made in one place, so that nothing else has to think of it."""
    package = Path(__file__).parents[2] / "distmon"
    makers = [
        path.name
        for path in package.rglob("*.py")
        if any(
            "Console(" in line and not line.lstrip().startswith("class ")
            for line in path.read_text().splitlines()
        )
    ]
    assert makers == ["terminal.py"]
    assert isinstance(terminal(), SafeConsole)
