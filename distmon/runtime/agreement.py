"""What all ranks must have in common: compared at attach, and at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

import distmon
from csrc_triton.row_layout import MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.gradient_gain import Blocks
from distmon.collect.inside.catalog import Catalog
from distmon.config import MonitorConfig
from distmon.errors import CollectiveError
from distmon.record.sample_tables import Sampling
from distmon.reduce.channel import Pending
from distmon.reduce.majority import by_value, listed, minority
from distmon.reduce.process_group import Ranks
from distmon.reduce.rank_slots import SLOT_SIZE
from distmon.sampling.plan import SamplePlan
from distmon.sampling.sample import hash48

COMPARED: Final = ("versions", "settings", "parameters or shapes")
"""What is compared at attach, as an error message calls it; the first that differs is named."""
_MAY_DIFFER: Final = frozenset(
    {"run_dir", "sinks", "wandb", "queue_size", "total_steps", "param_tags", "param_tag_cap"}
    | {"backend", "timeout_s", "callback_timeout_s", "strict", "notify"}
)
"""Settings that concern one rank alone."""


def agreement_hashes(
    config: MonitorConfig,
    plan: SamplePlan,
    sampling: Sampling,
    watched: tuple[Blocks, Catalog],
    partial_rows: Sequence[int],
) -> dict[str, int]:
    """Return 48 bits for each of COMPARED: what this rank samples, sends and decides by.

    `partial_rows` are the parameters whose partial gradients are sent.
    """
    sent = (SLOT_SIZE, SUM_COLUMNS, MAX_COLUMNS, partial_rows)
    texts = (
        f"{distmon.__version__}{sent}",
        config.model_dump_json(exclude=set(_MAY_DIFFER)),
        f"{plan.plan_hash}{sampling.trainable.tolist()}{watched}",
    )
    return {name: hash48(text) for name, text in zip(COMPARED, texts, strict=True)}


class StartAgreement:
    """Compares where the ranks start, at the first step of the process.

    Ranks that resumed differently would observe different steps, so nothing is observed before it
    is known that they agree. No rank waits for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._table: torch.Tensor | None = None
        self._exchange: Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether the other ranks have not answered yet."""
        return self._exchange is not None

    def begin(self, step: int, interval: int, next_observation: int, state_hash: int) -> None:
        """Send where this rank starts; `state_hash` is that of the state it loaded, or 0."""
        mine = torch.tensor([step, interval, next_observation, state_hash], dtype=torch.int64)
        self._table = self._ranks.table(mine)
        self._exchange = self._ranks.searches.launch((self._table, dist.ReduceOp.SUM))
        self.check()

    def join(self) -> None:
        """Wait for the other ranks; as `check`, or CollectiveError at the timeout of the group."""
        if self._exchange is not None:
            self._exchange.join()
        self.check()

    def check(self) -> None:
        """Raise CollectiveError on every rank when they differ, as soon as that is known."""
        if self._exchange is None or not self._exchange.done():
            return
        self._exchange.join()
        self._exchange = None
        assert self._table is not None
        steps, intervals, observations, states = self._table.T.tolist()
        for what, values in (
            ("first step", steps),
            ("interval", intervals),
            ("next observation", observations),
        ):
            if len({*values}) > 1:
                raise CollectiveError(
                    f"ranks resumed with a different {what} ({by_value(values)}); load the "
                    "monitor's state on every rank"
                )
        if others := minority(states):
            raise CollectiveError(
                f"rank {listed(others)} loaded a different state of the monitor; load the same on "
                "every rank"
            )
