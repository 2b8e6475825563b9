"""Faults of gradients and of single layers."""

from __future__ import annotations

from benchmarks.alarms.faulty.fault_case import fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.distributed import data_parallel
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import actor_critic
from benchmarks.alarms.kinds.representation import finetune
from benchmarks.alarms.kinds.setup import Fault
from benchmarks.alarms.kinds.tabular import recommender, regression
from benchmarks.alarms.kinds.vision import classifier

GRADIENTS = (
    fault_case(
        "regression-vanishing",
        "regression",
        regression,
        Fault(),
        ("grad_imbalance",),
        "[0-4]",
        activation="sigmoid",
        depth=8,
        lr=1e-3,
    ),
    fault_case(
        "plain-vanishing",
        "plain-mlp",
        regression,
        Fault(),
        ("grad_imbalance",),
        "[0-4]",
        activation="sigmoid",
        depth=9,
        lr=1e-3,
    ),
    fault_case(
        "regression-dead",
        "regression",
        regression,
        f.Dead("2.bias", 101),
        ("grad_imbalance", "frozen"),
        "[02]*",
        activation="relu",
        depth=3,
    ),
    fault_case(
        "plain-dead",
        "plain-mlp",
        regression,
        f.Dead("4.bias", 101),
        ("grad_imbalance", "frozen"),
        "[024]*",
        activation="relu",
        depth=4,
    ),
    fault_case("finetune-norm", "finetune", finetune, f.WrongNorm(0.5), "norm_mismatch", lr=1e-3),
    fault_case(
        "gpt-norm-unscaled", "gpt", language, f.WrongNorm(1024.0, 51), "norm_mismatch", clip=1e5
    ),
    fault_case(
        "gpt-sgd-norm",
        "gpt-optimizers",
        language,
        f.WrongNorm(0.6),
        "norm_mismatch",
        optimizer="sgd",
        lr=0.1,
    ),
    fault_case(
        "ddp-cnn-norm",
        "ddp-cnn",
        data_parallel,
        f.WrongNorm(0.5, by_rank=True),
        "norm_mismatch",
        model="cnn",
        steps=200,
    ),
    fault_case(
        "lora-nan",
        "lora",
        language,
        f.Nan("blocks.1.attention.qkv.a", 123),
        "nonfinite",
        "blocks.1*",
        model="lora",
    ),
    fault_case(
        "recommender-nan",
        "recommender",
        recommender,
        f.Nan("top.0.weight", 123),
        "nonfinite",
        "top.0*",
    ),
    fault_case(
        "resnet-nan",
        "resnet",
        classifier,
        f.Nan("blocks.1.conv1.weight", 123),
        "nonfinite",
        model="resnet",
    ),
    fault_case(
        "actor-nan",
        "actor-critic",
        actor_critic,
        f.Nan("actor.2.weight", 124),
        "nonfinite",
        "actor*",
    ),
)
