"""Faults of the data, and ranks that differ where they should not."""

from __future__ import annotations

from benchmarks.alarms.faulty.fault_case import fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.distributed import data_parallel
from benchmarks.alarms.kinds.generative import vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import q_learning
from benchmarks.alarms.kinds.representation import contrastive
from benchmarks.alarms.kinds.setup import Fault
from benchmarks.alarms.kinds.tabular import grokking, multitask, regression
from benchmarks.alarms.kinds.vision import classifier

DATA = (
    fault_case("gpt-same-batch", "gpt", language, f.SameBatch(101), "batch_repeats"),
    fault_case("vae-same-batch", "vae", vae, f.SameBatch(101), "batch_repeats"),
    fault_case("vit-same-batch", "vit", classifier, f.SameBatch(101), "batch_repeats", model="vit"),
    fault_case("q-same-batch", "q-learning", q_learning, f.SameBatch(81), "batch_repeats"),
    fault_case("cnn-spike", "cnn", classifier, f.Garbage(203, 203, 300.0), "loss_spike", within=10),
    fault_case(
        "regression-spike", "regression", regression, f.Garbage(203, 203), "loss_spike", within=10
    ),
    fault_case(
        "contrastive-spike",
        "contrastive",
        contrastive,
        f.Garbage(204, 204, 100.0),
        ("loss_spike",),
        within=10,
    ),
    fault_case(
        "resnet-spike",
        "resnet",
        classifier,
        f.Garbage(203, 203, 300.0),
        "loss_spike",
        model="resnet",
        within=10,
    ),
    fault_case(
        "gpt-garbage",
        "gpt",
        language,
        f.Garbage(151),
        ("loss_divergence", "loss_spike"),
        causes=("data", "batch"),
    ),
    fault_case(
        "cnn-shuffled",
        "cnn",
        classifier,
        f.Garbage(151, shuffle=True),
        ("loss_divergence", "loss_spike"),
        causes=("data", "label", "batch"),
    ),
    fault_case(
        "vit-shuffled",
        "vit",
        classifier,
        f.Garbage(151, shuffle=True),
        ("loss_divergence", "loss_spike"),
        causes=("data", "label", "batch"),
        model="vit",
    ),
    fault_case(
        "moe-garbage",
        "moe",
        language,
        f.Garbage(151),
        ("loss_divergence", "loss_spike"),
        causes=("data", "label", "batch"),
        model="moe",
    ),
    fault_case(
        "cnn-overfit",
        "cnn",
        classifier,
        Fault(),
        ("overfit", "val_increase"),
        examples=32,
        evaluate_every=50,
    ),
    fault_case(
        "grokking-overfit",
        "grokking",
        grokking,
        Fault(),
        ("overfit", "val_increase"),
        decay=0.0,
        evaluate_every=50,
    ),
    fault_case("multitask-collapse", "multitask", multitask, Fault(), "task_collapse", weight=40.0),
)
RANKS = (
    fault_case(
        "ddp-mlp-same-data",
        "ddp-mlp",
        data_parallel,
        f.SameOnRanks(),
        "ranks_share_data",
        steps=150,
    ),
    fault_case(
        "ddp-cnn-same-data",
        "ddp-cnn",
        data_parallel,
        f.SameOnRanks(),
        "ranks_share_data",
        model="cnn",
        steps=150,
    ),
    fault_case(
        "ddp-mlp-garbage",
        "ddp-mlp",
        data_parallel,
        f.GarbageOnRank(101),
        "rank_outlier",
        "rank 1",
        steps=200,
    ),
    fault_case(
        "ddp-cnn-garbage",
        "ddp-cnn",
        data_parallel,
        f.GarbageOnRank(101),
        "rank_outlier",
        "rank 1",
        model="cnn",
        steps=200,
    ),
    fault_case(
        "ddp-mlp-desync",
        "ddp-mlp",
        data_parallel,
        f.Desync(101),
        "replica_desync",
        "rank 1",
        steps=150,
    ),
    fault_case(
        "ddp-cnn-desync",
        "ddp-cnn",
        data_parallel,
        f.Desync(101),
        "replica_desync",
        "rank 1",
        model="cnn",
        steps=150,
    ),
)
