"""Reads and checks every input of a run, before ranks have anything to do with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from bad_input import BadInput
from checkpoints import Checkpoints, find_checkpoint, read_checkpoint
from corpus import Batches, Corpus, load_corpus
from gpt import GPT
from modes import Division, divide
from monitoring import MonitorPlan, check_monitor
from options import Options, read_options
from ranks import Ranks


@dataclass(frozen=True)
class Setup:
    """What stays the same during a run."""

    options: Options
    ranks: Ranks
    device: torch.device
    division: Division
    corpus: Corpus
    batches: Batches
    saver: Checkpoints
    first: int
    """Steps done before, by the run that is resumed."""
    monitor_plan: MonitorPlan | None


@dataclass(frozen=True)
class Beginning:
    """What the first step starts from, the same on every rank; nobody keeps it."""

    model: GPT
    """The whole model, new or from the checkpoint."""
    optimizer: dict[str, dict[str, Any]]
    """State by name of the parameter; none in a run that is not resumed."""
    monitor: dict[str, Any] | None


def prepare(arguments: list[str], ranks: Ranks) -> tuple[Setup, Beginning]:
    """Read every input of the run. Raises `BadInput`; calls no collective."""
    options = read_options(arguments, ranks.world, speaks=ranks.is_main)
    division = divide(options, ranks.world)
    plan = check_monitor(options.monitor) if options.monitor else None
    device = ranks.device(options.device)
    corpus = load_corpus(options.data, options.corpus_mb, options.context)
    saver = Checkpoints(options.checkpoint_dir, options.keep)
    if (options.save_every or (plan and plan.saves)) and ranks.is_main:
        saver.open()
    first, beginning = _begin(options, device)
    batches = Batches(
        corpus.train,
        options.context,
        options.batch_size,
        division.micro_batches,
        division.data_rank(ranks.rank),
        division.data,
        options.seed,
    )
    setup = Setup(options, ranks, device, division, corpus, batches, saver, first, plan)
    return setup, beginning


def _begin(options: Options, device: torch.device) -> tuple[int, Beginning]:
    """The steps done before and the state after them.

    No random state is restored because none is used: batches follow from the step alone and the
    model has no dropout.
    """
    torch.manual_seed(options.seed)
    model = GPT(options.shape, options.init_std).to(device)
    if not options.resume:
        return 0, Beginning(model, {}, None)
    path = find_checkpoint(options.resume, options.checkpoint_dir)
    content = read_checkpoint(path, options.shape, options.optimizer)
    first = int(content["step"])
    if first >= options.steps:
        raise BadInput(f"{path} is at step {first} already; give --steps a larger number")
    model.load_state_dict(content["model"])
    return first, Beginning(model, content["optimizer"], content.get("monitor"))
