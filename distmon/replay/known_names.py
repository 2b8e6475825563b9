"""What other loggers call the numbers that rules judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.metrics import RUN_METRICS, TASK_PREFIX, TOPK_FROZEN_PREFIX

STEP: Final = "step"
TIME: Final = "time"
EPOCH: Final = "epoch"
LOSS: Final = "train/step_loss"
LOSS_EMA: Final = "train/step_loss_ema"
VAL_LOSS: Final = "evaluation/val_loss"
EVAL_TRAIN_LOSS: Final = "evaluation/train_loss"


@dataclass(frozen=True)
class Quantity:
    """One number that rules or records use."""

    name: str
    """Short, for `--map`."""
    ours: str
    """Tag of the metric; step, time and epoch are none."""
    theirs: tuple[str, ...]
    """Globs of known names, best first; in lower case with `_` for blanks and dashes."""


QUANTITIES: Final = (
    Quantity(
        "step",
        STEP,
        (
            *("train/global_step", "trainer/global_step", "global_step", "step", "steps"),
            *("iteration", "iterations", "iter", "train/step", "_step"),
        ),
    ),
    Quantity("time", TIME, ("_timestamp", "timestamp", "wall_time", "time")),
    Quantity("epoch", EPOCH, ("epoch", "train/epoch", "trainer/epoch")),
    Quantity(
        "loss",
        LOSS,
        (
            *("loss", "train_loss", "train/loss", "train/train_loss", "training_loss"),
            *("train_loss_step", "train/loss_step", "loss/train", "loss/train/total"),
            *("training/loss", "lm_loss", "train/lm_loss", "train/crossentropyloss"),
            *("loss_metrics/global_avg_loss", "train/samples/train_loss", "batch_loss"),
        ),
    ),
    Quantity(
        "val_loss",
        VAL_LOSS,
        (
            *("val_loss", "eval_loss", "val/loss", "eval/loss", "valid_loss", "valid/loss"),
            *("validation_loss", "validation/loss", "loss/val", "loss/valid", "loss/validation"),
            *("loss/eval", "val/val_loss", "eval/eval_loss", "lm_loss_validation"),
        ),
    ),
    Quantity("eval_train_loss", EVAL_TRAIN_LOSS, ()),
    Quantity(
        # Loggers write the norm that clipping computed, so the one before clipping.
        "grad_norm",
        "train/unclipped_grad_norm",
        (
            *("grad_norm", "train/grad_norm", "train/gradient_norm", "gradient_norm"),
            *("global_grad_norm", "train/global_grad_norm", "total_grad_norm", "grad/norm"),
            *("optim/total_grad_norm", "l2_norm/grad/global", "gradnorm", "train/grad_norm_step"),
        ),
    ),
    Quantity("param_norm", "monitor/param_norm", ("param_norm", "params_norm", "weight_norm")),
    Quantity(
        "lr",
        "train/lr",
        (
            *("lr", "learning_rate", "train/lr", "train/learning_rate", "optim/lr"),
            *("optim/learning_rate_group0", "train/samples/lr", "lr_*"),
        ),
    ),
    Quantity(
        "tokens_per_second",
        "performance/tokens_per_second",
        (
            *("tokens_per_second", "tokens_per_sec", "train/tokens_per_second", "tokens/s"),
            *("tok/s", "throughput/tokens_per_sec", "throughput(tps)", "tps"),
        ),
    ),
    Quantity(
        "step_seconds",
        "performance/step_seconds",
        ("step_seconds", "step_time", "train/step_time", "iteration_time", "perf/step_time"),
    ),
)
_OURS: Final = frozenset(metric.name for metric in RUN_METRICS)


def choose_columns(columns: Iterable[str], asked: Mapping[str, str]) -> dict[str, str]:
    """Our tag to their column. `asked` (from `parse_map`) wins over what is known."""
    available = [*columns]
    chosen = {
        column: column
        for column in available
        if column in _OURS or column.startswith((TOPK_FROZEN_PREFIX, TASK_PREFIX))
    }
    for quantity in QUANTITIES:
        found = next(
            (c for glob in quantity.theirs for c in available if fnmatchcase(_plain(c), glob)), None
        )
        if found is not None:
            chosen.setdefault(quantity.ours, found)
    for ours, theirs in asked.items():
        if theirs not in available:
            raise ConfigError(
                f'there is no column "{theirs}", which was asked for as {ours}; '
                f"{suggest(theirs, available)}"
            )
    # What was asked for must not serve twice.
    return {o: t for o, t in chosen.items() if t not in asked.values()} | dict(asked)


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """`ours=theirs`, where ours is a short name or one of our metrics; `ConfigError` otherwise."""
    short = {quantity.name: quantity.ours for quantity in QUANTITIES}
    asked: dict[str, str] = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not equals or not theirs:
            raise ConfigError(f'bad map "{text}": expected ours=theirs, such as loss=my_loss')
        if ours not in short and ours not in _OURS:
            raise ConfigError(
                f'unknown name "{ours}" in --map {text}; {suggest(ours, [*short, *_OURS])}'
            )
        asked[short.get(ours, ours)] = theirs
    return asked


def _plain(column: str) -> str:
    return column.strip().lower().replace(" ", "_").replace("-", "_")
