"""Logs of other tools: what their columns mean, and what becomes a record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from distmon.errors import ConfigError
from distmon.replay import LogError, Recording, find_sources, parse_map, read_source, replay_run
from distmon.replay.column_names import QUANTITIES, choose_columns

HISTORY = """\
,_step,_timestamp,train/loss,train/grad_norm,train/learning_rate,eval/loss,train/epoch,note
0,10,1000.5,4.0,1.5,0.001,,0.1,warm
1,20,1010.5,3.0,1.0,0.001,,0.2,
2,20,1011.5,,,,3.2,0.2,
3,30,1020.5,NaN,inf,0.001,,0.3,bad
"""


def _read(path: Path, *maps: str, interval: int | None = None) -> list[Recording]:
    (source,) = find_sources(path)
    return read_source(source, parse_map(maps), interval)


def _one(tmp_path: Path, text: str, *maps: str, name: str = "log.csv") -> Recording:
    path = tmp_path / name
    path.write_text(text)
    (recording,) = _read(path, *maps)
    return recording


def test_a_history_that_pandas_wrote(tmp_path: Path) -> None:
    recording = _one(tmp_path, HISTORY)
    assert recording.kind == "table"
    assert recording.notes == ("columns that no rule uses: note",)
    first, second, third = recording.records
    assert [r.step for r in recording.records] == [10, 20, 30]
    assert [r.time for r in recording.records] == [1000.5, 1011.5, 1020.5]
    assert first.losses == {10: 4.0}
    assert first.metrics == {
        "train/step_loss": 4.0,
        "train/step_loss_ema": 4.0,
        "train/unclipped_grad_norm": 1.5,
        "train/lr": 0.001,
    }
    assert second.loss_ema == {20: pytest.approx(0.99 * 4.0 + 0.01 * 3.0)}
    assert len(first.params) == 0
    (evaluation,) = second.evaluations
    assert (evaluation.step, evaluation.epoch, evaluation.val_loss) == (20, 0.2, 3.2)
    assert evaluation.train_loss == 3.5  # the mean of the losses so far
    assert second.metrics["evaluation/val_loss"] == 3.2
    assert math.isnan(third.losses[30])
    assert third.loss_ema == {30: second.loss_ema[20]}


def test_a_chart_exported_from_wandb_holds_several_runs(tmp_path: Path) -> None:
    text = (
        '"Step","big - run - train/loss","big - run - train/loss__MIN",'
        '"big - run - train/loss__MAX","small - train/loss","small - train/loss__MIN",'
        '"small - train/loss__MAX"\n'
        '"10","4.0","3.9","4.1","5.0","5.0","5.0"\n'
        '"20","3.0","2.9","3.1","","",""\n'
    )
    path = tmp_path / "chart.csv"
    path.write_text(text)
    big, small = _read(path)
    assert (big.name, small.name) == (f"{path}:big - run", f"{path}:small")
    assert [r.losses for r in big.records] == [{10: 4.0}, {20: 3.0}]
    assert [r.losses for r in small.records] == [{10: 5.0}]
    assert big.notes == small.notes == ()
    with pytest.raises(LogError, match="holds 2 runs"):
        replay_run(path)


@pytest.mark.parametrize("kind", ["lines", "list", "trainer_state"])
def test_json_rows(kind: str, tmp_path: Path) -> None:
    rows = [
        {"step": 5, "loss": 2.0, "learning_rate": 0.1, "_wandb": {"runtime": 3}},
        {"step": 10, "loss": "NaN", "learning_rate": 0.1, "grad_norm": None},
        {"step": 10, "eval_loss": 2.5, "epoch": 1},
    ]
    if kind == "lines":
        text, name = "\n".join(map(json.dumps, rows)) + '\n{"step": 15, "lo', "history.jsonl"
    else:
        content = rows if kind == "list" else {"best_metric": None, "log_history": rows}
        text, name = json.dumps(content), "state.json"
    recording = _one(tmp_path, text, name=name)
    first, second = recording.records
    assert first.losses == {5: 2.0}
    assert math.isnan(second.losses[10])
    assert "train/unclipped_grad_norm" not in second.metrics
    assert second.evaluations[0].val_loss == 2.5
    assert second.evaluations[0].epoch == 1.0
    broken = "1 of 4 lines are invalid JSON and were skipped"
    assert (broken in recording.notes) == (kind == "lines")


def test_rows_of_one_step_are_one_observation(tmp_path: Path) -> None:
    """Lightning writes training and validation values on rows of their own, some without a step."""
    text = "epoch;step;train_loss;val_loss;lr-AdamW\n0;9;2.0;;0.1\n0;;;2.2;\n1;19;1.5;;0.1\n"
    recording = _one(tmp_path, text)
    assert [r.step for r in recording.records] == [9, 19]
    assert recording.records[0].evaluations[0].val_loss == 2.2
    assert recording.records[1].metrics["train/lr"] == 0.1


def test_losses_between_observations_belong_to_the_next(tmp_path: Path) -> None:
    rows = [f"{step},{10 - step},{1.0 if step % 3 == 0 else ''}" for step in range(1, 9)]
    recording = _one(tmp_path, "\n".join(["step,loss,grad_norm", *rows]))
    assert [[*r.losses] for r in recording.records] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss", *(r[:3] for r in rows)]))
    (losses_only,) = _read(tmp_path / "log.csv")
    assert [[*r.losses] for r in losses_only.records] == [[step] for step in range(1, 9)]
    (by_four,) = _read(tmp_path / "log.csv", interval=4)
    assert [(r.step, [*r.losses]) for r in by_four.records] == [
        (4, [1, 2, 3, 4]),
        (8, [5, 6, 7, 8]),
    ]
    assert by_four.records[1].metrics["train/step_loss"] == 2.0


def test_an_evaluation_is_held_against_the_losses_since_the_last(tmp_path: Path) -> None:
    recording = _one(tmp_path, "step,loss,val_loss\n1,4,\n2,3,5\n3,2,\n4,1,4\n5,,3\n")
    evaluations = [e for record in recording.records for e in record.evaluations]
    assert [e.train_loss for e in evaluations] == [3.5, 1.5, None]
    assert [e.improvement for e in evaluations] == [None, 0.2, 0.25]


def test_the_map_adds_and_overrides(tmp_path: Path) -> None:
    text = "n,loss,objective,grad_norm,step\n100,9,2.0,0.5,1\n200,9,1.0,0.5,2\n"
    maps = ("step=n", "loss=objective", "monitor/grad_norm=grad_norm")
    recording = _one(tmp_path, text, *maps)
    assert [r.losses for r in recording.records] == [{100: 2.0}, {200: 1.0}]
    assert recording.records[0].metrics["monitor/grad_norm"] == 0.5
    assert "train/unclipped_grad_norm" not in recording.records[0].metrics
    assert recording.notes == ("columns that no rule uses: loss, step",)
    replayed = replay_run(tmp_path / "log.csv", columns=dict(m.split("=") for m in maps))
    assert [r.step for r in replayed.records] == [100, 200]


def test_without_a_step_rows_are_counted(tmp_path: Path) -> None:
    recording = _one(tmp_path, "loss\n3\n2\n")
    assert [r.step for r in recording.records] == [1, 2]
    assert "no column has the step" in recording.notes[0]
    skipped = _one(tmp_path, "step,loss\n1,3\nlast,2\n")
    assert [r.losses for r in skipped.records] == [{1: 3.0}]
    assert skipped.notes == ("1 rows have an invalid step and were skipped",)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("log.csv", b"a,b\n1,2\n", "no column is known to the rules (columns: a, b)"),
        ("log.csv", b"", "(columns: none)"),
        ("log.csv", b"step,loss\n\xff\xfe\n", "it is not UTF-8 text"),
        ("log.jsonl", b"loss 3\nloss 2\n", "holds no JSON"),
        ("log.json", b"3", "must be a list of JSON objects, not a int"),
        ("log.bin", b"", "has an unknown file type: expected .csv"),
    ],
)
def test_what_cannot_be_used_is_named(
    name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(LogError) as caught:
        _read(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("loss", 'bad map "loss": expected metric=column'),
        ("los=x", 'unknown name "los" in --map los=x; did you mean "loss"?'),
        ("loss=objektive", 'there is no column "objektive"'),
    ],
)
def test_a_wrong_map_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _one(tmp_path, "step,objective\n1,2\n", text)
    assert sentence in str(caught.value)


def test_known_names_belong_to_one_quantity() -> None:
    names = [name for quantity in QUANTITIES for name in quantity.aliases]
    assert len(names) == len(set(names))
    assert choose_columns(["LM Loss", "grad-norm", "learning-rate"], {}) == {
        "train/step_loss": "LM Loss",
        "train/unclipped_grad_norm": "grad-norm",
        "train/lr": "learning-rate",
    }


def test_no_rule_fails_where_there_are_no_parameters(tmp_path: Path) -> None:
    names = [quantity.name for quantity in QUANTITIES if quantity.name != "step"]
    rows = [
        {"step": step} | {name: 2.0 + step % 7 for name in names if name != "val_loss" or step % 5}
        for step in range(1, 200)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    replay = replay_run(path, columns={"eval_train_loss": "eval_train_loss"})
    assert replay.failures == ()
    assert len(replay.records) == 199
    assert replay.records[1].evaluations[0].train_loss == 4.0


def test_rules_evaluate_the_log_of_another_tool(tmp_path: Path) -> None:
    rows = [f"{step},{300.0 if step == 50 else 3.0}" for step in range(1, 81)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["step,loss", *rows]))
    replay = replay_run(path)
    assert replay.failures == ()
    assert [(a.rule, a.step) for a in replay.alarms if a.rule == "loss_spike"] == [
        ("loss_spike", 50)
    ]
    assert "frozen" in replay.idle
    assert "loss_spike" not in replay.idle
