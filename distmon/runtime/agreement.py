"""What all ranks must have in common: compared at attach, and at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Final

import torch

from csrc_triton.row_layout import MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.gradient_gain import Blocks
from distmon.config import MonitorConfig
from distmon.errors import CollectiveError
from distmon.record.statistics import Sampling
from distmon.reduce.process_group import Ranks, minority
from distmon.reduce.rank_slots import SLOT_SIZE
from distmon.sampling.plan import SamplePlan
from distmon.sampling.sample import hash48

COMPARED: Final = ("versions", "settings", "parameters or shapes")
"""What is compared at attach, as an error message calls it; the first that differs is named."""
_MAY_DIFFER: Final = frozenset(
    {"run_dir", "sinks", "wandb", "queue_size", "total_steps", "param_tags", "param_tag_cap"}
    | {"backend", "timeout_s", "notify"}
)
"""Settings that concern one rank alone."""


def agreement_hashes(
    config: MonitorConfig,
    plan: SamplePlan,
    sampling: Sampling,
    blocks: Blocks,
    partial_rows: Sequence[int],
) -> dict[str, int]:
    """Return 48 bits for each of COMPARED: what this rank samples, sends and decides by.

    `partial_rows` are the parameters whose partial gradients are sent.
    """
    sent = (SLOT_SIZE, SUM_COLUMNS, MAX_COLUMNS, partial_rows)
    texts = (
        f"{metadata.version('distmon')}{sent}",
        config.model_dump_json(exclude=set(_MAY_DIFFER)),
        f"{plan.plan_hash}{sampling.trainable.tolist()}{blocks}",
    )
    return {name: hash48(text) for name, text in zip(COMPARED, texts, strict=True)}


def agree_on_start(ranks: Ranks, step: int, device: torch.device) -> None:
    """Raise CollectiveError on every rank when ranks resume from different steps."""
    starts = ranks.gather(torch.tensor([step], device=device)).flatten().tolist()
    if others := minority(starts):
        steps = ", ".join(map(str, dict.fromkeys(starts)))
        raise CollectiveError(
            f"rank {', '.join(map(str, others))} resumed from a different step (first steps: "
            f"{steps}); load the monitor's state on every rank"
        )
