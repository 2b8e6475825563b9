"""Map the column names of other loggers to distmon's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.metrics import RUN_METRICS, TASK_PREFIX, TOPK_FROZEN_PREFIX, current_name

STEP: Final = "step"
TIME: Final = "time"
EPOCH: Final = "epoch"
LOSS: Final = "train/step_loss"
LOSS_EMA: Final = "train/step_loss_ema"
VAL_LOSS: Final = "evaluation/val_loss"
EVAL_TRAIN_LOSS: Final = "evaluation/train_loss"


@dataclass(frozen=True)
class Quantity:
    """A value that rules or records use, and its names in other logs."""

    name: str
    """Short name for `--map`."""
    metric: str
    """distmon's metric, or step, time or epoch."""
    aliases: tuple[str, ...]
    """Globs of known column names, best first; in lower case, with `_` for spaces and dashes."""


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
        # Loggers write the norm that clip_grad_norm_ returns, which is the one before clipping.
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
_METRICS: Final = frozenset(metric.name for metric in RUN_METRICS)


def choose_columns(columns: Iterable[str], requested: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each metric. `requested` (from `parse_map`) overrides known names.

    Raises ConfigError for a requested column that does not exist.
    """
    available = [*columns]
    chosen = {
        current_name(column): column
        for column in available
        if current_name(column) in _METRICS or column.startswith((TOPK_FROZEN_PREFIX, TASK_PREFIX))
    }
    for quantity in QUANTITIES:
        found = next(
            (c for glob in quantity.aliases for c in available if fnmatchcase(_plain(c), glob)),
            None,
        )
        if found is not None:
            chosen.setdefault(quantity.metric, found)
    for metric, column in requested.items():
        if column not in available:
            raise ConfigError(
                f'there is no column "{column}" for {metric}; {suggest(column, available)}'
            )
    # A requested column is used for one metric only.
    return {m: c for m, c in chosen.items() if c not in requested.values()} | dict(requested)


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """Parse `metric=column`, where metric is a short name or a tag; raise ConfigError otherwise."""
    short = {quantity.name: quantity.metric for quantity in QUANTITIES}
    requested: dict[str, str] = {}
    for text in texts:
        name, equals, column = text.partition("=")
        name = current_name(name)
        if not equals or not column:
            raise ConfigError(f'bad map "{text}": expected metric=column, such as loss=my_loss')
        if name not in short and name not in _METRICS:
            raise ConfigError(
                f'unknown name "{name}" in --map {text}; {suggest(name, [*short, *_METRICS])}'
            )
        requested[short.get(name, name)] = column
    return requested


def _plain(column: str) -> str:
    return column.strip().lower().replace(" ", "_").replace("-", "_")
