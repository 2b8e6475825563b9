"""Faults that were silent before, and healthy runs that look like them; all of the tuning half."""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import DIVERGES, LR, fault_case
from benchmarks.alarms.healthy_cases import COSINE, WSD, healthy_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds import lookalikes as k
from benchmarks.alarms.kinds.generative import diffusion
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.setup import Fault, warmup_cosine
from benchmarks.alarms.kinds.tabular import recommender, regression
from benchmarks.alarms.kinds.vision import classifier

FLAT = ("loss_flat", "loss_insensitive", "not_learning")
"""Rules that see that the loss does not follow the weights."""
DECAY = ("weight_decay_high", "weight_collapse")
NONE, SIGN, TWICE, CHANCE = Fault(), f.WrongSign(), f.SoftmaxTwice(), f.Garbage(1, shuffle=True)


def _fault(name: str, make: object, fault: Fault, rules: object, **options: object) -> Case:
    """Return a fault in the kind that the name begins with, of 400 steps."""
    kind = name.partition("-")[0]
    return fault_case(name, kind, make, fault, rules, steps=400, **options)  # type: ignore


SILENT_FAULTY: tuple[Case, ...] = (
    _fault("cnn-wrong-sign", classifier, SIGN, "wrong_sign", causes=("sign",)),
    _fault("gpt-wrong-sign", language, SIGN, "wrong_sign", causes=("sign",)),
    _fault(
        "lstm-wrong-sign",
        language,
        SIGN,
        "wrong_sign",
        causes=("sign",),
        model="lstm",
        optimizer="sgd",
        lr=0.05,
    ),
    _fault(
        "bert-wrong-sign",
        language,
        SIGN,
        "wrong_sign",
        causes=("sign",),
        model="bert",
        optimizer="lion",
        lr=3e-4,
    ),
    _fault(
        "regression-wrong-sign",
        regression,
        SIGN,
        ("wrong_sign", *DIVERGES),
        causes=("sign",),
        clip=1.0,
        optimizer="sgd",
        lr=0.01,
    ),
    _fault("cnn-chance", classifier, CHANCE, FLAT, causes=("label",)),
    _fault("cnn-chance-sgd", classifier, CHANCE, FLAT, optimizer="sgd", lr=0.02),
    _fault("recommender-chance", recommender, CHANCE, FLAT, causes=("label",)),
    _fault("regression-chance", regression, CHANCE, FLAT, causes=("label",)),
    _fault("cnn-one-batch", classifier, f.SameBatch(1), "batch_repeats"),
    _fault("gpt-few-batches", language, NONE, "batch_repeats", tokens=3),
    _fault("regression-one-batch", regression, f.SameBatch(1), "batch_repeats"),
    _fault("diffusion-one-batch", diffusion, f.SameBatch(1), "batch_repeats"),
    _fault("gpt-huge-decay", language, NONE, DECAY, causes=("decay",), decay=100.0),
    _fault("cnn-huge-decay", classifier, NONE, DECAY, causes=("decay",), decay=30.0),
    _fault("regression-huge-decay", regression, NONE, DECAY, causes=("decay",), decay=10.0),
    _fault("lstm-huge-decay", language, NONE, DECAY, causes=("decay",), model="lstm", decay=20.0),
    _fault("gpt-clipped", language, NONE, FLAT, causes=("clip",), clip=1e-9),
    _fault("cnn-clipped", classifier, NONE, FLAT, causes=("clip",), clip=1e-9),
    _fault("lstm-clipped", language, NONE, FLAT, causes=("clip",), model="lstm", clip=1e-9),
    _fault(
        "bert-clipped", language, NONE, FLAT, causes=("clip",), model="bert", depth=4, clip=1e-9
    ),
    _fault("cnn-twice", classifier, TWICE, FLAT, optimizer="sgd", lr=0.01),
    _fault("gpt-twice", language, TWICE, FLAT),
    _fault("lstm-twice", language, TWICE, FLAT, model="lstm", optimizer="sgd", lr=0.05),
    _fault(
        "regression-dead-start",
        regression,
        f.DeadFromStart("*.bias"),
        (*FLAT, "dead_units", "frozen"),
        activation="relu",
        depth=3,
    ),
    _fault("cnn-empty", classifier, f.Garbage(1, scale=0.0), (*FLAT, "batch_repeats")),
    _fault(
        "gpt-exploded", language, NONE, DIVERGES, causes=LR, optimizer="sgd", lr=100.0, clip=None
    ),
    _fault("cnn-exploded", classifier, NONE, DIVERGES, causes=LR, optimizer="sgd", lr=1e4),
)
SILENT_HEALTHY: tuple[Case, ...] = (
    healthy_case("recall", "recall", k.recall, 400),
    healthy_case("recall-long", "recall", k.recall, 500, length=20, lr=2e-3),
    healthy_case("recall-sgd", "recall", k.recall, 400, optimizer="sgd", lr=0.3),
    healthy_case("clicks", "clicks", k.clicks, 400),
    healthy_case("clicks-cosine", "clicks", k.clicks, schedule=COSINE, lr=1e-3, size=512),
    healthy_case("clicks-sgd", "clicks", k.clicks, 400, optimizer="sgd", lr=0.02, known=0.15),
    healthy_case("floor", "at-the-floor", k.at_the_floor),
    healthy_case("floor-low", "at-the-floor", k.at_the_floor, lr=1e-4),
    healthy_case("likelihood-sgd", "likelihood", k.likelihood, optimizer="sgd", lr=1e-3),
    healthy_case("wealth", "wealth", k.wealth, 400),
    healthy_case("wealth-lion", "wealth", k.wealth, optimizer="lion", lr=1e-3, schedule=WSD),
    healthy_case("similarity", "similarity", k.similarity),
    healthy_case("all-data", "one-batch", k.one_batch, clip=None),
    healthy_case("ten-batches", "one-batch", k.one_batch, batches=10),
    healthy_case("ten-noisy", "one-batch", k.one_batch, batches=10, noisy=True, lr=1e-3),
    healthy_case("seven-batches", "one-batch", k.one_batch, batches=7, optimizer="sgd", lr=0.02),
    healthy_case("freezing-images", "freezing-images", k.freezing_images),
    healthy_case(
        "freezing-early",
        "freezing-images",
        k.freezing_images,
        at=(40, 50),
        optimizer="sgd",
        lr=0.02,
    ),
    healthy_case("queued", "queued", k.queued),
    healthy_case("late-branch", "late-branch", k.late_branch),
    healthy_case("late-branch-sgd", "late-branch", k.late_branch, optimizer="sgd", lr=0.02),
    healthy_case("halves-in-turn", "halves-in-turn", k.halves_in_turn),
    healthy_case("halves-sgd", "halves-in-turn", k.halves_in_turn, optimizer="sgd", lr=0.02),
    healthy_case("annealed", "annealed", k.annealed),
    healthy_case("annealed-cosine", "annealed", k.annealed, schedule=COSINE, most=10.0),
    healthy_case("penalized", "penalized", k.penalized, clip=None),
    healthy_case("sparse-words", "sparse-words", k.sparse_words),
    healthy_case("cnn-strong-decay", "cnn", classifier, decay=1.0, schedule=COSINE),
    healthy_case("regression-strong-decay", "regression", regression, decay=0.5, lr=1e-2),
    healthy_case("gpt-huge-loss", "gpt", language, scale=1e7),
    healthy_case("gpt-slow-warmup", "gpt", language, schedule=warmup_cosine(400, 250), lr=3e-3),
    healthy_case("regression-huge", "regression", regression, scale=1e6, clip=1.0),
)
