"""The faulty runs of the audit set, and the alert that each has to have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.alarms.audit import decisions as d
from benchmarks.alarms.audit import perception as p
from benchmarks.alarms.audit import sequences as s
from benchmarks.alarms.audit import tables as t
from benchmarks.alarms.audit import techniques as q
from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.setup import Fault, Setup, warmup_cosine

NONE = Fault()
DIVERGES = (
    *("loss_divergence", "loss_spike", "grad_norm_high", "update_ratio_high", "nonfinite"),
    *("weight_norm_spike", "weight_divergence", "lr_check", "activation_explosion"),
)
"""What is right to say when the steps are too long."""
STARVED = ("not_learning", "update_ratio_low", "update_lost", "lr_zero", "frozen", "loss_flat")
"""What is right to say when the steps are too short to matter."""
NOTHING = ("loss_flat", "loss_insensitive", "not_learning", "cannot_learn", "frozen")
"""What is right to say when no weight has an influence on the loss."""


def _case(
    name: str,
    kind: str,
    make: object,
    fault: Fault,
    rules: tuple[str, ...],
    place: str = "",
    **options: object,
) -> Case:
    options.setdefault("steps", 400)
    return fault_case(name, kind, make, fault, rules, place, **options)  # type: ignore[arg-type]


@dataclass
class FlippedBit(Fault):
    """A bit of one weight flips in the memory of rank 1."""

    name: str
    at: int

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Flip the third highest bit of the mantissa."""
        if step == self.at and dist.get_rank() == 1:
            setup.parameter(self.name).view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 20)


AUDIT_FAULTY = (
    _case(
        "source-text-rate",
        "source-text",
        s.source_text,
        NONE,
        (*DIVERGES, "not_learning"),
        lr=1.0,
        schedule=warmup_cosine(400, 20),
        clip=None,
        tied=False,
    ),
    _case(
        "unaligned-silence",
        "unaligned",
        s.unaligned,
        NONE,
        ("nonfinite",),
        nan_at=203,
        from_step=203,
    ),
    _case("pointers-empty", "pointers", s.pointers, NONE, NOTHING, empty=True),
    _case(
        "prompt-detached",
        "prompt-tuning",
        s.prompt_tuning,
        NONE,
        ("frozen", "cannot_learn", "grad_imbalance", "update_ratio_low"),
        "prompt*",
        detached=True,
        lr=1e-2,
    ),
    _case(
        "angular-new-head",
        "angular-margin",
        p.angular_margin,
        NONE,
        ("frozen", "cannot_learn", "update_ratio_low"),
        "head*",
        replaced=True,
    ),
    _case(
        "latent-no-teacher",
        "latent-prediction",
        p.latent_prediction,
        NONE,
        ("representation_collapse", "weight_collapse", "loss_flat", "not_learning", "dead_units"),
        has_signal=False,
        teacher=False,
    ),
    _case(
        "ordered-raw",
        "ordered-classes",
        t.ordered_classes,
        NONE,
        (
            "saturated",
            "grad_imbalance",
            "not_learning",
            "loss_flat",
            "loss_plateau",
            "dead_units",
            "frozen",
            "loss_insensitive",
            "slow_improvement",
        ),
        raw=True,
        optimizer="sgd",
        lr=0.1,
    ),
    _case(
        "survival-flipped",
        "survival",
        t.survival,
        NONE,
        ("wrong_sign", "loss_divergence", "loss_spike", "weight_divergence", "weight_norm_spike"),
        flip_at=251,
        from_step=251,
        steps=500,
    ),
    _case(
        "graph-decay",
        "whole-graph",
        t.whole_graph,
        f.Decay(1.0),
        ("weight_decay_high", "weight_collapse", "loss_flat", "not_learning"),
        optimizer="nesterov",
        lr=0.05,
        steps=300,
    ),
    _case(
        "rare-dead",
        "rare-events",
        t.rare_events,
        NONE,
        ("dead_units", "grad_imbalance", *NOTHING),
        bias=-10.0,
    ),
    _case(
        "consistency-clipped",
        "consistency",
        d.consistency,
        NONE,
        STARVED,
        optimizer="sgd",
        lr=0.05,
        clip=1e-6,
    ),
    _case(
        "world-model-kl",
        "world-model",
        d.world_model,
        NONE,
        ("task_imbalance", "task_collapse", "representation_collapse", "grad_imbalance"),
        weight=1000.0,
        free=0.0,
        clip=10.0,
    ),
    _case("velocities-same", "velocities", d.velocities, f.SameBatch(221), ("batch_repeats",)),
    _case(
        "adapters-schedule",
        "merged-adapters",
        q.merged_adapters,
        NONE,
        STARVED,
        from_step=20,
        schedule=lambda step: 0.8**step,
        every=10_000,
    ),
    _case(
        "federated-no-zero-grad",
        "federated",
        q.federated,
        f.NoZeroGrad(201),
        ("stale_gradients",),
        optimizer="plain-sgd",
        lr=0.5,
    ),
    _case(
        "ramp-undivided",
        "batch-ramp",
        q.batch_ramp,
        NONE,
        DIVERGES,
        undivided_at=251,
        from_step=251,
        optimizer="nesterov",
        lr=0.1,
        clip=None,
    ),
    _case("ramp-eval-mode", "batch-ramp", q.batch_ramp, f.EvalMode(201), ("eval_mode",)),
    _case(
        "ddp-shop-shuffled",
        "ddp-shop",
        q.shop,
        NONE,
        ("rank_outlier",),
        "rank 1",
        shuffled_on=1,
        lr=1e-2,
        steps=300,
    ),
    _case(
        "ddp-ink-bit",
        "ddp-ink",
        q.ink,
        FlippedBit("down.3.weight", 121),
        ("replica_desync",),
        "rank 1",
        steps=200,
    ),
)
