"""The faulty runs of the sealed set, and the alert that each has to have."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import fault_case, in_bf16
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.setup import Fault, Setup
from benchmarks.alarms.sealed import perception as p
from benchmarks.alarms.sealed import sequences as s
from benchmarks.alarms.sealed import tables as t
from benchmarks.alarms.sealed import techniques as q

NONE = Fault()
DIVERGES = (
    *("loss_divergence", "loss_spike", "grad_norm_high", "update_ratio_high", "nonfinite"),
    *("weight_norm_spike", "weight_divergence", "lr_check", "activation_explosion"),
)
"""What is right to say when the steps are too long."""
ROSE = ("loss_divergence", "loss_spike")


def _case(
    name: str,
    kind: str,
    make: object,
    fault: Fault,
    rules: tuple[str, ...],
    place: str = "",
    **options: object,
) -> Case:
    options.setdefault("steps", 300)
    return fault_case(name, kind, make, fault, rules, place, **options)  # type: ignore[arg-type]


@dataclass
class OldWeights(Fault):
    """Rank 1 continues from a checkpoint that is twenty steps older."""

    at: int
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Keep the weights, and load them later."""
        if step == self.at - 20:
            self.kept = {name: each.clone() for name, each in setup.named_parameters()}
        if step == self.at and dist.get_rank() == 1:
            for name, each in setup.named_parameters():
                each.copy_(self.kept[name])


def _rotations_in_bf16(seed: int) -> Setup:
    return in_bf16(p.rotations(seed, lr=1e-5))


SEALED_FAULTY = (
    _case(
        "mixing-no-warmup",
        "time-mixing",
        s.time_mixing,
        NONE,
        (*DIVERGES, "not_learning"),
        optimizer="sgd",
        lr=20.0,
        clip=None,
        steps=200,
    ),
    _case(
        "mixing-leak",
        "time-mixing",
        s.time_mixing,
        NONE,
        ("loss_spike",),
        has_signal=False,
        leaks=True,
    ),
    _case("returns-eval-mode", "returns-to-go", s.returns_to_go, f.EvalMode(151), ("eval_mode",)),
    _case(
        "returns-few",
        "returns-to-go",
        s.returns_to_go,
        NONE,
        ("overfit", "val_increase"),
        examples=3,
        evaluate_every=25,
        steps=500,
    ),
    _case("pixels-resumed", "pixels", s.pixels, f.LrFactor(181, 50.0), ("lr_jump",)),
    _case(
        "topics-wrong-sign",
        "topics",
        t.topics,
        NONE,
        ("wrong_sign", *DIVERGES),
        sign=-1.0,
        lr=5e-3,
        clip=None,
    ),
    _case(
        "clouds-misaligned",
        "point-clouds",
        p.point_clouds,
        NONE,
        ROSE,
        misaligned_at=251,
        from_step=251,
        steps=400,
    ),
    _case(
        "rotations-bf16",
        "rotations",
        _rotations_in_bf16,
        NONE,
        ("update_lost", "frozen", "not_learning", "update_ratio_low"),
    ),
    _case(
        "relativistic-lost",
        "relativistic",
        p.relativistic,
        NONE,
        (*ROSE, "grad_imbalance", "grad_norm_high", "saturated", "dead_units", "update_ratio_high"),
        fast=0.05,
        slow=1e-4,
        penalty=0.0,
        steps=500,
    ),
    _case(
        "exits-reset",
        "early-exits",
        p.early_exits,
        f.Reset("blocks.2.*", 203),
        ("weights_replaced",),
        "blocks.2*",
    ),
    _case(
        "facts-rows",
        "facts",
        t.facts,
        f.RowsExplode("thing.weight", 151),
        ("exploding_rows",),
        "thing*",
        normed=False,
        lr=1e-2,
    ),
    _case(
        "claims-twice", "claims", t.claims, f.BackwardTwice(101), ("backward_repeated",), lr=1e-3
    ),
    _case(
        "experts-closed",
        "gated-experts",
        t.gated_experts,
        NONE,
        ("frozen", "cannot_learn", "dead_expert", "router_collapse", "grad_imbalance"),
        "experts.1*",
        closed=True,
        decay=0.0,
    ),
    _case(
        "matchings-root",
        "matchings",
        t.matchings,
        NONE,
        ("nonfinite",),
        root=True,
        same_at=183,
        from_step=183,
        lr=1e-3,
    ),
    _case(
        "values-no-update",
        "value-distributions",
        t.value_distributions,
        NONE,
        ("loss_plateau", "loss_flat"),
        has_signal=False,
        every=0,
    ),
    _case(
        "centred-no-zero-grad",
        "own-optimizer",
        q.own_optimizer,
        f.NoZeroGrad(1),
        ("stale_gradients",),
        curvature=False,
        lr=0.01,
    ),
    _case(
        "average-decay",
        "switched-average",
        q.switched_average,
        f.Decay(20.0),
        ("weight_decay_high", "weight_collapse"),
        lr=3e-3,
        causes=("decay",),
    ),
    _case(
        "ddp-tagger-same", "ddp-tagger", q.tagger, f.SameOnRanks(), ("ranks_share_data",), steps=120
    ),
    _case(
        "ddp-clouds-garbage",
        "ddp-clouds",
        p.point_clouds,
        f.GarbageOnRank(101),
        ("rank_outlier",),
        "rank 1",
        parallel=True,
        steps=200,
    ),
    _case(
        "ddp-clouds-old",
        "ddp-clouds",
        p.point_clouds,
        OldWeights(121),
        ("replica_desync",),
        "rank 1",
        parallel=True,
        steps=160,
    ),
)
