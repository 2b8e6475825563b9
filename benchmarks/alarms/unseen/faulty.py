"""The faulty runs of the unseen set, and the alert that each has to have."""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import DIVERGES, LR, fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.setup import Fault
from benchmarks.alarms.unseen import perception as p
from benchmarks.alarms.unseen import reasoning as r
from benchmarks.alarms.unseen import schedules as s

NONE = Fault()
FLAT = ("loss_flat", "loss_insensitive", "not_learning")
"""Rules that see that the loss does not follow the weights."""
DECAY = ("weight_decay_high", "weight_collapse")


def _case(
    name: str, make: object, fault: Fault, rules: object, place: str = "", **options: object
) -> Case:
    kind = options.pop("kind", make.__name__.replace("_", "-"))  # type: ignore[attr-defined]
    options.setdefault("steps", 400)
    return fault_case(name, kind, make, fault, rules, place, **options)  # type: ignore[arg-type]


UNSEEN_FAULTY = (
    _case("sounds-wrong-sign", p.sounds, NONE, "wrong_sign", causes=("sign",), sign=-1.0),
    _case(
        "molecules-wrong-sign",
        r.molecules,
        NONE,
        ("wrong_sign", *DIVERGES),
        causes=("sign",),
        sign=-1.0,
        optimizer="sgd",
        lr=0.01,
    ),
    _case("sounds-chance", p.sounds, f.Garbage(1, shuffle=True), FLAT, causes=("label",)),
    _case("retention-chance", r.retention, NONE, FLAT, causes=("label",), chance=True),
    _case("molecules-same-batch", r.molecules, f.SameBatch(1), "batch_repeats"),
    _case("sounds-three-batches", p.sounds, NONE, "batch_repeats", batches=3),
    _case("sounds-huge-decay", p.sounds, NONE, DECAY, causes=("decay",), decay=30.0),
    _case("spectra-huge-decay", s.spectra, NONE, DECAY, causes=("decay",), decay=100.0, lr=1e-3),
    _case("retention-clipped", r.retention, NONE, FLAT, causes=("clip",), clip=1e-9),
    _case("spectra-clipped", s.spectra, NONE, FLAT, causes=("clip",), clip=1e-9, lr=1e-3),
    _case("retention-twice", r.retention, NONE, FLAT, twice=True, optimizer="sgd", lr=0.05),
    _case("sounds-twice", p.sounds, NONE, FLAT, twice=True, optimizer="sgd", lr=0.05),
    _case("spectra-dead", s.spectra, NONE, (*FLAT, "dead_units", "frozen"), dead=True),
    _case("control-dead", r.control, f.Multiply("*", 0.0), (*FLAT, "frozen", "grad_imbalance")),
    _case(
        "sounds-empty",
        p.sounds,
        f.Garbage(1, scale=0.0),
        (*FLAT, "batch_repeats"),
        causes=("label", "data", "input"),
    ),
    _case(
        "molecules-exploded",
        r.molecules,
        NONE,
        DIVERGES,
        causes=LR,
        optimizer="plain-sgd",
        lr=30.0,
        clip=None,
    ),
    _case("spectra-detached", s.spectra, NONE, "frozen", "body*", detached=True),
    _case("turns-reset", s.turns, f.Reset("head.0*", 257), "weights_replaced", "head*"),
    _case("freezing-lr-jump", s.freezing, f.LrFactor(151, 50.0), "lr_jump"),
    _case("growing-no-zero-grad", p.growing, f.NoZeroGrad(201), "stale_gradients"),
)
