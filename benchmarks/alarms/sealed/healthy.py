"""The healthy runs of the sealed set."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.alarms.cases import Case
from benchmarks.alarms.healthy_cases import healthy_case
from benchmarks.alarms.kinds.setup import restarts, warmup_cosine, warmup_stable_decay
from benchmarks.alarms.sealed import perception as p
from benchmarks.alarms.sealed import sequences as s
from benchmarks.alarms.sealed import tables as t
from benchmarks.alarms.sealed import techniques as q


def _case(
    name: str, kind: str, make: object, steps: int = 400, every: int = 10, **options: object
) -> Case:
    """Return a healthy run that is observed every so many steps."""
    return replace(healthy_case(name, kind, make, steps, **options), interval=every)


SEALED_HEALTHY = (
    _case(
        "time-mixing",
        "time-mixing",
        s.time_mixing,
        600,
        20,
        schedule=warmup_cosine(600, 40, 0.1),
        evaluate_every=100,
    ),
    _case("time-mixing-deep", "time-mixing", s.time_mixing, 300, depth=4, lr=1e-3, decay=0.1),
    _case("copying", "copying", s.copying, 600),
    _case("returns-to-go", "returns-to-go", s.returns_to_go, 400, lr=1e-3, evaluate_every=100),
    _case("pixels", "pixels", s.pixels, 300, schedule=warmup_stable_decay(300)),
    _case("pixels-sgd", "pixels", s.pixels, 400, 20, optimizer="nesterov", lr=0.1),
    _case("discrete-codes", "discrete-codes", s.discrete_codes, 600, clip=5.0, lr=2e-3),
    _case("point-clouds", "point-clouds", p.point_clouds, 500, schedule=warmup_cosine(500)),
    _case(
        "point-clouds-smoothed",
        "point-clouds",
        p.point_clouds,
        400,
        5,
        smoothing=0.1,
        optimizer="lamb",
        lr=0.01,
    ),
    _case("rotations", "rotations", p.rotations, 800, 20, clip=None, lr=1e-3),
    _case("rotations-restarts", "rotations", p.rotations, 600, schedule=restarts(200)),
    _case("relativistic", "relativistic", p.relativistic, 800, 20),
    _case("blots", "blots", p.blots, 400),
    _case("growing-pictures", "growing-pictures", p.growing_pictures, 400, lr=1e-3),
    _case("early-exits", "early-exits", p.early_exits, 400, lr=1e-3),
    _case("automaton", "automaton", p.automaton, 500, lr=2e-3),
    _case("kernel", "kernel", t.kernel, 300, 5, lr=1e-2, clip=None, decay=0.0),
    _case("facts", "facts", t.facts, 600, lr=5e-3, decay=0.0, clip=None),
    _case("claims", "claims", t.claims, 800, 20, lr=1e-3, clip=None),
    _case("topics", "topics", t.topics, 500, lr=5e-3, clip=None),
    _case("gated-experts", "gated-experts", t.gated_experts, 500, lr=5e-3),
    _case("matchings", "matchings", t.matchings, 300, lr=1e-3),
    _case("logged-choices", "logged-choices", t.logged_choices, 400, lr=1e-3),
    _case("value-distributions", "value-distributions", t.value_distributions, 600),
    _case("curvature", "own-optimizer", q.own_optimizer, 500, schedule=warmup_cosine(500, 20, 0.1)),
    _case("centred", "own-optimizer", q.own_optimizer, 500, 20, curvature=False, lr=0.1),
    _case("private", "private", q.private, 400, 10),
    _case("rewired", "rewired", q.rewired, 400, lr=3e-3),
    _case("own-labels", "own-labels", q.own_labels, 400, lr=2e-3),
    _case("switched-average", "switched-average", q.switched_average, 400, 5, lr=1e-3),
    _case("ddp-tagger", "ddp-tagger", q.tagger, 200, 5),
    _case("ddp-clouds", "ddp-clouds", p.point_clouds, 200, parallel=True),
)
