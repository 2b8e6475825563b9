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


def _case(name: str, kind: str, make: object, steps: int = 300, **options: object) -> Case:
    def build(seed: int) -> Setup:
        setup: Setup = make(seed=seed, **options)  # type: ignore[operator]
        return setup

    ranks = 2 if kind.startswith("ddp") else 1
    return Case(name, kind, build, steps, 10, ranks=ranks)


HEALTHY = (
    _case("cnn-adamw", "cnn", classifier),
    _case("cnn-sgd-steps", "cnn", classifier, optimizer="sgd", lr=0.05, schedule=staircase(120)),
    _case("cnn-dropout-eval", "cnn", classifier, dropout=0.3, schedule=COSINE, evaluate_every=60),
    _case("cnn-rmsprop", "cnn", classifier, optimizer="rmsprop", lr=1e-3),
    _case("cnn-epochs", "cnn", classifier, examples=640, smoothing=0.1),
    _case("resnet-sgd", "resnet", classifier, model="resnet", optimizer="sgd", lr=0.05),
    _case("resnet-deep", "resnet", classifier, model="resnet", depth=8, schedule=COSINE),
    _case("resnet-lion", "resnet", classifier, model="resnet", optimizer="lion", lr=5e-4),
    _case("vit-adamw", "vit", classifier, model="vit", schedule=COSINE, clip=1.0),
    _case("vit-deep", "vit", classifier, model="vit", depth=7, lr=1e-3, schedule=WSD, clip=1.0),
    _case("vit-sgd", "vit", classifier, model="vit", optimizer="sgd", lr=0.03, clip=1.0),
    _case("lstm-adamw", "lstm", language, model="lstm"),
    _case("lstm-sgd", "lstm", language, model="lstm", optimizer="sgd", lr=0.3, clip=0.5),
    _case("lstm-cosine", "lstm", language, model="lstm", lr=5e-3, schedule=COSINE),
    _case("gru-adamw", "gru", language, model="gru", evaluate_every=60),
    _case("gru-adagrad", "gru", language, model="gru", optimizer="adagrad", lr=0.03),
    _case("gpt-constant", "gpt", language),
    _case("gpt-cosine", "gpt", language, schedule=COSINE, evaluate_every=60),
    _case("gpt-wsd", "gpt", language, schedule=WSD, dropout=0.1),
    _case("gpt-restarts", "gpt", language, schedule=restarts(100)),
    _case("gpt-deep", "gpt", language, depth=8, width=16, lr=2e-3, schedule=COSINE),
    _case("gpt-accumulate", "gpt", language, accumulate=3, batch_size=8),
    _case("gpt-long", "gpt", language, 600, lr=2e-3, schedule=warmup_cosine(600)),
    _case("gpt-no-clip", "gpt", language, clip=None, lr=2e-3),
    _case("gpt-sgd", "gpt-optimizers", language, optimizer="sgd", lr=0.1),
    _case("gpt-adafactor", "gpt-optimizers", language, optimizer="adafactor", lr=0.02),
    _case("gpt-lion", "gpt-optimizers", language, optimizer="lion", lr=5e-4, schedule=COSINE),
    _case("gpt-muon", "gpt-optimizers", language, optimizer="muon", lr=0.02, schedule=WSD),
    _case("gpt-muon-deep", "gpt-optimizers", language, optimizer="muon", depth=7, width=16),
    _case("bert-adamw", "bert", language, model="bert", schedule=COSINE),
    _case("bert-deep", "bert", language, model="bert", depth=7, width=16, lr=1e-3),
    _case("t5-adamw", "t5", language, model="t5", lr=2e-3, schedule=COSINE),
    _case("t5-adafactor", "t5", language, model="t5", optimizer="adafactor", lr=0.01),
    _case("vae-adamw", "vae", vae),
    _case("vae-anneal", "vae", vae, anneal=150, schedule=COSINE),
    _case("vae-tiny-loss", "vae", vae, scale=1e-4),
    _case("gan-softplus", "gan", gan),
    _case("gan-hinge", "gan", gan, hinge=True, ratio=2.0),
    _case("gan-norm", "gan", gan, norm=True, lr=5e-4),
    _case("diffusion-adamw", "diffusion", diffusion),
    _case("diffusion-ema", "diffusion", diffusion, ema=True, depth=4, schedule=WSD),
    _case("diffusion-lion", "diffusion", diffusion, optimizer="lion", lr=3e-4),
    _case("flow-adamw", "flow", flow),
    _case("flow-clipped", "flow", flow, depth=8, clip=5.0, schedule=COSINE),
    _case("contrastive-adamw", "contrastive", contrastive),
    _case("contrastive-learned", "contrastive", contrastive, learned=True, schedule=COSINE),
    _case("byol-adamw", "byol", byol),
    _case("byol-fast", "byol", byol, momentum=0.95, schedule=COSINE),
    _case("policy-gradient", "policy-gradient", policy_gradient),
    _case("policy-no-baseline", "policy-gradient", policy_gradient, baseline=False, entropy=0.05),
    _case("actor-critic", "actor-critic", actor_critic),
    _case("actor-critic-slow", "actor-critic", actor_critic, lr=5e-4, critic_lr=2e-3),
    _case("q-learning", "q-learning", q_learning),
    _case("q-learning-fast", "q-learning", q_learning, every=15, discount=0.8),
    _case("regression-adamw", "regression", regression),
    _case("regression-eval", "regression", regression, schedule=COSINE, evaluate_every=50),
    _case("regression-tanh", "regression", regression, activation="tanh", depth=7, lr=1e-3),
    _case("regression-full-batch", "regression", regression, full_batch=True, optimizer="sgd"),
    _case("loss-times-1e-4", "scaled-loss", regression, scale=1e-4),
    _case("loss-times-1e4", "scaled-loss", regression, scale=1e4, depth=3),
    _case("gpt-loss-1e3", "scaled-loss", language, scale=1e3, clip=1e3),
    _case("lora", "lora", language, model="lora", lr=5e-3),
    _case("lora-cosine", "lora", language, model="lora", depth=4, lr=1e-2, schedule=COSINE),
    _case("probe", "probe", finetune, mode="probe", lr=5e-3),
    _case("probe-sgd", "probe", finetune, mode="probe", optimizer="sgd", lr=0.1),
    _case("finetune", "finetune", finetune, schedule=COSINE, evaluate_every=60),
    _case("finetune-unfreeze", "finetune", finetune, unfreeze_at=105, lr=1e-3),
    _case("finetune-sgd", "finetune", finetune, optimizer="sgd", lr=0.01),
    _case("moe", "moe", language, model="moe"),
    _case("moe-deep", "moe", language, model="moe", depth=3, width=16, schedule=COSINE),
    _case("recommender", "recommender", recommender),
    _case("recommender-adagrad", "recommender", recommender, optimizer="adagrad", lr=0.05),
    _case("multitask", "multitask", multitask),
    _case("multitask-cosine", "multitask", multitask, weight=1.0, schedule=COSINE),
    _case("curriculum-length", "curriculum", language, lengthen=True),
    _case("curriculum-harder", "curriculum", regression, harder_at=150),
    _case("grokking", "grokking", grokking, 600, evaluate_every=200),
    _case("plain-relu", "plain-mlp", regression, activation="relu", depth=4),
    _case("plain-accumulate", "plain-mlp", regression, depth=3, accumulate=4, clip=1.0),
    _case("lbfgs", "lbfgs", regression, 150, optimizer="lbfgs", lr=0.3, full_batch=True),
    _case("bf16-weights", "bf16", language, dtype="bfloat16", lr=5e-3),
    _case("bf16-high-rate", "bf16", language, dtype="bfloat16", lr=1e-2, schedule=COSINE),
    _case("ddp-mlp", "ddp-mlp", data_parallel, 200),
    _case("ddp-mlp-accumulate", "ddp-mlp", data_parallel, 200, accumulate=2, schedule=COSINE),
    _case("ddp-cnn", "ddp-cnn", data_parallel, 200, model="cnn"),
    _case("ddp-cnn-sgd", "ddp-cnn", data_parallel, 200, model="cnn", optimizer="sgd", lr=0.03),
)
