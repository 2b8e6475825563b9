"""The loss on the validation text, for the person at the screen and for the monitor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from arrangement import Arrangement
from corpus import validation_starts, windows
from display import Display
from monitoring import Monitor
from preparation import Setup


def evaluate(setup: Setup, arrangement: Arrangement) -> float:
    """The loss on a fixed part of the validation text. Every rank must call it."""
    options, ranks, text = setup.options, setup.ranks, setup.corpus.validation
    starts = validation_starts(len(text), options.context, options.eval_sequences)
    mine = starts[setup.division.data_rank(ranks.rank) :: setup.division.data]
    # At most as many sequences at once as in training, so that evaluation fits into memory too.
    at_once = setup.batches.sequences
    total = torch.zeros(2, device=setup.device)
    # Ranks may need each other for every pass, so all do as many as the first, which has most.
    for at in range(0, len(starts[:: setup.division.data]), at_once):
        chunk = mine[at : at + at_once]
        inputs, targets = windows(text, chunk if len(chunk) else starts[:1], options.context)
        loss = arrangement.evaluate(inputs.to(setup.device), targets.to(setup.device))
        if loss is not None:
            total += torch.stack([loss, torch.ones_like(loss)]) * len(chunk)
    summed, count = ranks.total(total).tolist()
    return summed / count


def evaluate_and_tell(
    setup: Setup,
    arrangement: Arrangement,
    monitor: Monitor | None,
    display: Display,
    step: int,
    recent: Sequence[torch.Tensor],
) -> float:
    """Evaluate after `step`; `recent` are the training losses to compare with, none at step 0."""
    options, ranks = setup.options, setup.ranks
    loss = evaluate(setup, arrangement)
    display.line(f"step:{step}/{options.steps} val_loss:{loss:.4f}")
    if monitor:
        train_loss = ranks.mean(torch.stack([*recent]).mean()) if recent else None
        seen = step * options.batch_size * options.context
        monitor.evaluated(
            train_loss=train_loss, val_loss=loss, epoch=seen / len(setup.corpus.train)
        )
    return loss
