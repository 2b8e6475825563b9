"""The healthy runs of the audit set."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.alarms.audit import decisions as d
from benchmarks.alarms.audit import perception as p
from benchmarks.alarms.audit import sequences as s
from benchmarks.alarms.audit import tables as t
from benchmarks.alarms.audit import techniques as q
from benchmarks.alarms.cases import Case
from benchmarks.alarms.healthy_cases import healthy_case
from benchmarks.alarms.kinds.setup import (
    restarts,
    staircase,
    warmup_cosine,
    warmup_stable_decay,
)


def _case(
    name: str, kind: str, make: object, steps: int = 400, every: int = 10, **options: object
) -> Case:
    """Return a healthy run that is observed every so many steps."""
    return replace(healthy_case(name, kind, make, steps, **options), interval=every)


AUDIT_HEALTHY = (
    _case(
        "source-text",
        "source-text",
        s.source_text,
        900,
        20,
        schedule=warmup_cosine(900, 60),
        evaluate_every=100,
    ),
    _case(
        "source-text-summed",
        "source-text",
        s.source_text,
        500,
        tied=False,
        dropout=0.1,
        summed=True,
        clip=None,
        schedule=warmup_stable_decay(500, 50),
    ),
    _case("unaligned", "unaligned", s.unaligned, 600),
    _case("unaligned-sgd", "unaligned", s.unaligned, 800, 20, optimizer="sgd", lr=0.1, clip=5.0),
    _case("pointers", "pointers", s.pointers, 600, 5, schedule=warmup_cosine(600, 30, 0.1)),
    _case("prompt-tuning", "prompt-tuning", s.prompt_tuning, 400, lr=1e-2),
    _case("angular-margin", "angular-margin", p.angular_margin, 500),
    _case(
        "angular-margin-sgd",
        "angular-margin",
        p.angular_margin,
        600,
        20,
        optimizer="nesterov",
        lr=0.01,
        schedule=staircase(300),
        evaluate_every=100,
    ),
    _case("decorrelation", "decorrelation", p.decorrelation, 400, lr=1e-3, clip=None),
    _case("latent-prediction", "latent-prediction", p.latent_prediction, 400),
    _case("capsules", "capsules", p.capsules, 500, clip=None, lr=2e-3),
    _case("splines", "splines", p.splines, 600, schedule=warmup_cosine(600, 10), lr=1e-2),
    _case("splines-restarts", "splines", p.splines, 600, 5, schedule=restarts(150), lr=1e-2),
    _case("survival", "survival", t.survival, 400, lr=1e-3, decay=0.1, evaluate_every=50),
    _case("ordered-classes", "ordered-classes", t.ordered_classes, 800, 20, lr=1e-2, clip=None),
    _case("rankings", "rankings", t.rankings, 300, 5),
    _case("rankings-pairwise", "rankings", t.rankings, pairwise=True, optimizer="adagrad", lr=0.05),
    _case("rare-events", "rare-events", t.rare_events, 600, lr=1e-3),
    _case("whole-graph", "whole-graph", t.whole_graph, 200, 5, lr=1e-2, evaluate_every=20),
    _case("group-policy", "group-policy", d.group_policy, 400),
    _case("world-model", "world-model", d.world_model, 400, lr=2e-3, clip=10.0),
    _case("velocities", "velocities", d.velocities, 1500, 50, lr=1e-3),
    _case("consistency", "consistency", d.consistency, 600),
    _case("equilibrium", "equilibrium", d.equilibrium, 400, schedule=warmup_cosine(400)),
    _case("federated", "federated", q.federated, 600, 20, optimizer="plain-sgd", lr=0.5),
    _case("merged-adapters", "merged-adapters", q.merged_adapters, 500, schedule=q.merged_rate()),
    _case("momentum-cycle", "momentum-cycle", q.momentum_cycle, 400),
    _case("found-rate", "found-rate", q.found_rate, 400),
    _case("batch-ramp", "batch-ramp", q.batch_ramp, 400, lr=1e-3),
    _case("ddp-shop", "ddp-shop", q.shop, 300, lr=1e-2),
    _case("ddp-ink", "ddp-ink", q.ink, 200, 5, optimizer="nesterov", lr=0.05),
)
