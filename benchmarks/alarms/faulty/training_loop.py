"""Faults of the learning rate and of the training loop."""

from __future__ import annotations

from benchmarks.alarms.faulty.fault_case import DIVERGES, LR, STARVED, fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.distributed import data_parallel
from benchmarks.alarms.kinds.generative import diffusion, flow, gan, vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import actor_critic
from benchmarks.alarms.kinds.representation import byol, contrastive, finetune
from benchmarks.alarms.kinds.setup import Fault
from benchmarks.alarms.kinds.tabular import regression
from benchmarks.alarms.kinds.vision import classifier

LEARNING_RATE = (
    fault_case(
        "cnn-lr-high", "cnn", classifier, Fault(), DIVERGES, causes=LR, lr=3.0, optimizer="sgd"
    ),
    fault_case("gpt-lr-high", "gpt", language, Fault(), DIVERGES, causes=LR, lr=0.3),
    fault_case("vae-lr-high", "vae", vae, Fault(), DIVERGES, causes=LR, lr=0.3),
    fault_case("gru-lr-high", "gru", language, Fault(), DIVERGES, causes=LR, model="gru", lr=0.5),
    fault_case("vit-lr-high", "vit", classifier, Fault(), DIVERGES, causes=LR, model="vit", lr=0.3),
    fault_case("flow-lr-high", "flow", flow, Fault(), DIVERGES, causes=LR, optimizer="sgd", lr=0.3),
    fault_case("gpt-lr-jump", "gpt", language, f.LrFactor(151, 100.0), "lr_jump", within=40),
    fault_case("lstm-lr-jump", "lstm", language, f.LrFactor(101, 50.0), "lr_jump", model="lstm"),
    fault_case("moe-lr-jump", "moe", language, f.LrFactor(151, 100.0), "lr_jump", model="moe"),
    fault_case("gan-lr-jump", "gan", gan, f.LrFactor(151, 30.0), "lr_jump"),
    fault_case("bert-lr-zero", "bert", language, f.LrFactor(101, 0.0), "lr_zero", model="bert"),
    fault_case("regression-lr-zero", "regression", regression, f.LrFactor(151, 0.0), "lr_zero"),
    fault_case("t5-lr-zero", "t5", language, f.LrFactor(121, 0.0), "lr_zero", model="t5", lr=2e-3),
    fault_case("contrastive-lr-zero", "contrastive", contrastive, f.LrFactor(151, 0.0), "lr_zero"),
    fault_case("cnn-starved", "cnn", classifier, Fault(), STARVED, causes=LR, lr=1e-8),
    fault_case("diffusion-starved", "diffusion", diffusion, Fault(), STARVED, causes=LR, lr=3e-8),
    fault_case(
        "gpt-sgd-starved", "gpt-optimizers", language, Fault(), STARVED, optimizer="sgd", lr=1e-6
    ),
    fault_case("flow-starved", "flow", flow, Fault(), STARVED, causes=LR, lr=1e-8),
)
LOOP = (
    fault_case(
        "cnn-no-zero-grad", "cnn", classifier, f.NoZeroGrad(101), "stale_gradients", within=40
    ),
    fault_case(
        "lora-no-zero-grad", "lora", language, f.NoZeroGrad(1), "stale_gradients", model="lora"
    ),
    fault_case(
        "resnet-no-zero-grad",
        "resnet",
        classifier,
        f.NoZeroGrad(1),
        "stale_gradients",
        model="resnet",
    ),
    fault_case(
        "actor-no-zero-grad", "actor-critic", actor_critic, f.NoZeroGrad(51), "stale_gradients"
    ),
    fault_case("vae-backward-twice", "vae", vae, f.BackwardTwice(1), "backward_repeated"),
    fault_case("byol-backward-twice", "byol", byol, f.BackwardTwice(101), "backward_repeated"),
    fault_case(
        "t5-backward-twice",
        "t5",
        language,
        f.BackwardTwice(101),
        "backward_repeated",
        model="t5",
        lr=2e-3,
    ),
    fault_case(
        "flow-backward-twice", "flow", flow, f.BackwardTwice(1), "backward_repeated", steps=150
    ),
    fault_case("cnn-eval-mode", "cnn", classifier, f.EvalMode(121), "eval_mode", dropout=0.2),
    fault_case(
        "finetune-eval-mode", "finetune", finetune, f.EvalMode(101), "eval_mode", "*bn*", lr=1e-3
    ),
    fault_case(
        "resnet-eval-mode",
        "resnet",
        classifier,
        f.EvalMode(101),
        "eval_mode",
        "*bn*",
        model="resnet",
    ),
    fault_case(
        "ddp-cnn-eval-mode", "ddp-cnn", data_parallel, f.EvalMode(81), "eval_mode", model="cnn"
    ),
)
