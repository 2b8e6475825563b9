"""The healthy runs of the second corpus."""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.kinds.distributed import data_parallel
from benchmarks.alarms.kinds.generative import diffusion, flow, gan, vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import actor_critic, policy_gradient, q_learning
from benchmarks.alarms.kinds.representation import byol, contrastive, finetune
from benchmarks.alarms.kinds.setup import (
    Setup,
    restarts,
    staircase,
    warmup_cosine,
    warmup_stable_decay,
)
from benchmarks.alarms.kinds.tabular import grokking, multitask, recommender, regression
from benchmarks.alarms.kinds.vision import classifier

COSINE, WSD = warmup_cosine(300), warmup_stable_decay(300)


def healthy_case(
    name: str,
    kind: str,
    make: object,
    steps: int = 300,
    seed_offset: int = 0,
    **options: object,
) -> Case:
    """Return a run that has to be without warnings."""

    def build(seed: int) -> Setup:
        setup: Setup = make(seed=seed + seed_offset, **options)  # type: ignore[operator]
        return setup

    ranks = 2 if kind.startswith("ddp") else 1
    return Case(name, kind, build, steps, 10, ranks=ranks)


HEALTHY = (
    healthy_case("cnn-adamw", "cnn", classifier),
    healthy_case(
        "cnn-sgd-steps", "cnn", classifier, optimizer="sgd", lr=0.05, schedule=staircase(120)
    ),
    healthy_case(
        "cnn-dropout-eval", "cnn", classifier, dropout=0.3, schedule=COSINE, evaluate_every=60
    ),
    healthy_case("cnn-rmsprop", "cnn", classifier, optimizer="rmsprop", lr=1e-3),
    healthy_case("cnn-epochs", "cnn", classifier, examples=640, smoothing=0.1),
    healthy_case("resnet-sgd", "resnet", classifier, model="resnet", optimizer="sgd", lr=0.05),
    healthy_case("resnet-deep", "resnet", classifier, model="resnet", depth=8, schedule=COSINE),
    healthy_case("resnet-lion", "resnet", classifier, model="resnet", optimizer="lion", lr=5e-4),
    healthy_case("vit-adamw", "vit", classifier, model="vit", schedule=COSINE, clip=1.0),
    healthy_case(
        "vit-deep", "vit", classifier, model="vit", depth=7, lr=1e-3, schedule=WSD, clip=1.0
    ),
    healthy_case("vit-sgd", "vit", classifier, model="vit", optimizer="sgd", lr=0.03, clip=1.0),
    healthy_case("lstm-adamw", "lstm", language, model="lstm"),
    healthy_case("lstm-sgd", "lstm", language, model="lstm", optimizer="sgd", lr=0.3, clip=0.5),
    healthy_case("lstm-cosine", "lstm", language, model="lstm", lr=5e-3, schedule=COSINE),
    healthy_case("gru-adamw", "gru", language, model="gru", evaluate_every=60),
    healthy_case("gru-adagrad", "gru", language, model="gru", optimizer="adagrad", lr=0.03),
    healthy_case("gpt-constant", "gpt", language),
    healthy_case("gpt-cosine", "gpt", language, schedule=COSINE, evaluate_every=60),
    healthy_case("gpt-wsd", "gpt", language, schedule=WSD, dropout=0.1),
    healthy_case("gpt-restarts", "gpt", language, schedule=restarts(100)),
    healthy_case("gpt-deep", "gpt", language, depth=8, width=16, lr=2e-3, schedule=COSINE),
    healthy_case("gpt-accumulate", "gpt", language, accumulate=3, batch_size=8),
    healthy_case("gpt-long", "gpt", language, 600, lr=2e-3, schedule=warmup_cosine(600)),
    healthy_case("gpt-no-clip", "gpt", language, clip=None, lr=2e-3),
    healthy_case("gpt-sgd", "gpt-optimizers", language, optimizer="sgd", lr=0.1),
    healthy_case("gpt-adafactor", "gpt-optimizers", language, optimizer="adafactor", lr=0.02),
    healthy_case(
        "gpt-lion", "gpt-optimizers", language, optimizer="lion", lr=5e-4, schedule=COSINE
    ),
    healthy_case("gpt-muon", "gpt-optimizers", language, optimizer="muon", lr=0.02, schedule=WSD),
    healthy_case("gpt-muon-deep", "gpt-optimizers", language, optimizer="muon", depth=7, width=16),
    healthy_case("bert-adamw", "bert", language, model="bert", schedule=COSINE),
    healthy_case("bert-deep", "bert", language, model="bert", depth=7, width=16, lr=1e-3),
    healthy_case("t5-adamw", "t5", language, model="t5", lr=2e-3, schedule=COSINE),
    healthy_case("t5-adafactor", "t5", language, model="t5", optimizer="adafactor", lr=0.01),
    healthy_case("vae-adamw", "vae", vae),
    healthy_case("vae-anneal", "vae", vae, anneal=150, schedule=COSINE),
    healthy_case("vae-tiny-loss", "vae", vae, scale=1e-4),
    healthy_case("gan-softplus", "gan", gan),
    healthy_case("gan-hinge", "gan", gan, hinge=True, ratio=2.0),
    healthy_case("gan-norm", "gan", gan, norm=True, lr=5e-4),
    healthy_case("diffusion-adamw", "diffusion", diffusion),
    healthy_case("diffusion-ema", "diffusion", diffusion, ema=True, depth=4, schedule=WSD),
    healthy_case("diffusion-lion", "diffusion", diffusion, optimizer="lion", lr=3e-4),
    healthy_case("flow-adamw", "flow", flow),
    healthy_case("flow-clipped", "flow", flow, depth=8, clip=5.0, schedule=COSINE),
    healthy_case("contrastive-adamw", "contrastive", contrastive),
    healthy_case("contrastive-learned", "contrastive", contrastive, learned=True, schedule=COSINE),
    healthy_case("byol-adamw", "byol", byol),
    healthy_case("byol-fast", "byol", byol, momentum=0.95, schedule=COSINE),
    healthy_case("policy-gradient", "policy-gradient", policy_gradient),
    healthy_case(
        "policy-no-baseline", "policy-gradient", policy_gradient, baseline=False, entropy=0.05
    ),
    healthy_case("actor-critic", "actor-critic", actor_critic),
    healthy_case("actor-critic-slow", "actor-critic", actor_critic, lr=5e-4, critic_lr=2e-3),
    healthy_case("q-learning", "q-learning", q_learning),
    healthy_case("q-learning-fast", "q-learning", q_learning, every=15, discount=0.8),
    healthy_case("regression-adamw", "regression", regression),
    healthy_case("regression-eval", "regression", regression, schedule=COSINE, evaluate_every=50),
    healthy_case("regression-tanh", "regression", regression, activation="tanh", depth=7, lr=1e-3),
    healthy_case(
        "regression-full-batch", "regression", regression, full_batch=True, optimizer="sgd"
    ),
    healthy_case("loss-times-1e-4", "scaled-loss", regression, scale=1e-4),
    healthy_case("loss-times-1e4", "scaled-loss", regression, scale=1e4, depth=3),
    healthy_case("gpt-loss-1e3", "scaled-loss", language, scale=1e3, clip=1e3),
    healthy_case("lora", "lora", language, model="lora", lr=5e-3),
    healthy_case("lora-cosine", "lora", language, model="lora", depth=4, lr=1e-2, schedule=COSINE),
    healthy_case("probe", "probe", finetune, mode="probe", lr=5e-3),
    healthy_case("probe-sgd", "probe", finetune, mode="probe", optimizer="sgd", lr=0.1),
    healthy_case("finetune", "finetune", finetune, schedule=COSINE, evaluate_every=60),
    healthy_case("finetune-unfreeze", "finetune", finetune, unfreeze_at=105, lr=1e-3),
    healthy_case("finetune-sgd", "finetune", finetune, optimizer="sgd", lr=0.01),
    healthy_case("moe", "moe", language, model="moe"),
    healthy_case("moe-deep", "moe", language, model="moe", depth=3, width=16, schedule=COSINE),
    healthy_case("recommender", "recommender", recommender),
    healthy_case("recommender-adagrad", "recommender", recommender, optimizer="adagrad", lr=0.05),
    healthy_case("multitask", "multitask", multitask),
    healthy_case("multitask-cosine", "multitask", multitask, weight=1.0, schedule=COSINE),
    healthy_case("curriculum-length", "curriculum", language, lengthen=True),
    healthy_case("curriculum-harder", "curriculum", regression, harder_at=150),
    healthy_case("grokking", "grokking", grokking, 600, evaluate_every=200),
    healthy_case("plain-relu", "plain-mlp", regression, activation="relu", depth=4),
    healthy_case("plain-accumulate", "plain-mlp", regression, depth=3, accumulate=4, clip=1.0),
    healthy_case("lbfgs", "lbfgs", regression, 150, optimizer="lbfgs", lr=0.3, full_batch=True),
    healthy_case("bf16-weights", "bf16", language, dtype="bfloat16", lr=5e-3),
    healthy_case("bf16-high-rate", "bf16", language, dtype="bfloat16", lr=1e-2, schedule=COSINE),
    healthy_case("ddp-mlp", "ddp-mlp", data_parallel, 200),
    healthy_case(
        "ddp-mlp-accumulate", "ddp-mlp", data_parallel, 200, accumulate=2, schedule=COSINE
    ),
    healthy_case("ddp-cnn", "ddp-cnn", data_parallel, 200, model="cnn"),
    healthy_case(
        "ddp-cnn-sgd", "ddp-cnn", data_parallel, 200, model="cnn", optimizer="sgd", lr=0.03
    ),
)
