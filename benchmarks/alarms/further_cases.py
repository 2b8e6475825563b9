"""Further healthy runs of the tuning half.

Added after the first score: the rules had no false warning on the first healthy runs of the tuning
half, which were too few kinds and optimizers to choose thresholds on. The held-back half was not
changed.
"""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.healthy_cases import COSINE, WSD, healthy_case
from benchmarks.alarms.kinds import further as k
from benchmarks.alarms.kinds.generative import diffusion, vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.representation import byol, finetune
from benchmarks.alarms.kinds.tabular import recommender, regression
from benchmarks.alarms.kinds.vision import classifier

OPTIMIZERS = (("sgd", 0.05), ("lion", 5e-4), ("adafactor", 0.01), ("adagrad", 0.03))


def _each(name: str, kind: str, make: object, **options: object) -> list[Case]:
    """Return the same run with four optimizers."""
    return [
        healthy_case(f"{name}-by-{optimizer}", kind, make, optimizer=optimizer, lr=lr, **options)
        for optimizer, lr in OPTIMIZERS
    ]


FURTHER: tuple[Case, ...] = (
    healthy_case("alternating", "alternating", k.alternating),
    healthy_case("alternating-sgd", "alternating", k.alternating, optimizer="sgd", lr=0.01),
    healthy_case("mixture-density", "mixture-density", k.mixture_density),
    healthy_case("mixture-cosine", "mixture-density", k.mixture_density, schedule=COSINE, lr=1e-2),
    *_each("forecast", "forecast", k.forecast),
    healthy_case("forecast-wsd", "forecast", k.forecast, schedule=WSD),
    healthy_case("triplet", "triplet", k.triplet),
    healthy_case("triplet-sgd", "triplet", k.triplet, optimizer="sgd", lr=0.05),
    healthy_case("graph", "graph", k.graph),
    healthy_case("graph-nodes", "graph", k.graph, full_batch=False, optimizer="lion", lr=1e-3),
    healthy_case("stochastic-depth", "stochastic-depth", k.stochastic_depth),
    healthy_case("stochastic-deep", "stochastic-depth", k.stochastic_depth, depth=9, skip=0.6),
    healthy_case("post-norm", "stochastic-depth", k.stochastic_depth, skip=0.0, schedule=COSINE),
    *_each("post-norm", "stochastic-depth", k.stochastic_depth, skip=0.0, depth=8),
    healthy_case("distillation", "distillation", k.distillation),
    healthy_case("distillation-sgd", "distillation", k.distillation, optimizer="sgd", lr=0.1),
    *_each("autoencoder", "autoencoder", k.convolutional_autoencoder),
    healthy_case("closure", "closure", k.closure),
    healthy_case("heavy-tailed", "heavy-tailed", k.heavy_tailed),
    healthy_case("heavy-tailed-sgd", "heavy-tailed", k.heavy_tailed, optimizer="sgd", lr=0.003),
    *_each("cnn", "cnn", classifier, seed_offset=1),
    *_each("lstm", "lstm", language, model="lstm", seed_offset=1),
    *_each("bert", "bert", language, model="bert", depth=7, width=16),
    *_each("diffusion", "diffusion", diffusion, seed_offset=1),
    *_each("regression", "regression", regression, depth=4),
    *_each("recommender", "recommender", recommender, seed_offset=1),
    *_each("byol", "byol", byol),
    *_each("finetune", "finetune", finetune, seed_offset=1),
    healthy_case("vae-sgd", "vae", vae, optimizer="sgd", lr=2e-4),
    healthy_case("vae-lion", "vae", vae, optimizer="lion", lr=5e-4),
    healthy_case("bert-bf16", "bert", language, model="bert", dtype="bfloat16", lr=5e-3),
    healthy_case("lstm-bf16", "lstm", language, model="lstm", dtype="bfloat16", lr=5e-3),
    healthy_case("cnn-small-batch", "cnn", classifier, batch_size=4, lr=1e-3),
    healthy_case("regression-relu-deep", "regression", regression, activation="relu", depth=6),
    healthy_case("regression-examples", "regression", regression, examples=20, evaluate_every=100),
    healthy_case("regression-long", "regression", regression, 600, lr=1e-2),
    healthy_case("lora-sgd", "lora", language, model="lora", optimizer="sgd", lr=1.0),
)
