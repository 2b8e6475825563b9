"""Parameters that do not learn, and weights that change as they should not."""

from __future__ import annotations

from benchmarks.alarms.faulty.fault_case import fault_case, in_bf16
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.generative import diffusion, gan, vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import q_learning
from benchmarks.alarms.kinds.representation import contrastive
from benchmarks.alarms.kinds.setup import Fault
from benchmarks.alarms.kinds.tabular import recommender, regression
from benchmarks.alarms.kinds.vision import classifier

STUCK = (
    fault_case(
        "gpt-frozen-block", "gpt", language, f.Freeze("blocks.1.*"), "cannot_learn", "blocks.1*"
    ),
    fault_case(
        "recommender-frozen",
        "recommender",
        recommender,
        f.Freeze("items.*"),
        "cannot_learn",
        "items*",
    ),
    fault_case(
        "vit-frozen", "vit", classifier, f.Freeze("patch.*"), "cannot_learn", "patch*", model="vit"
    ),
    fault_case(
        "gru-frozen", "gru", language, f.Freeze("embed.*"), "cannot_learn", "embed*", model="gru"
    ),
    fault_case(
        "bert-left-out", "bert", language, f.LeftOut("head.*"), "frozen", "head*", model="bert"
    ),
    fault_case("gan-left-out", "gan", gan, f.LeftOut("critic.2.*"), "frozen", "critic.2*"),
    fault_case(
        "moe-left-out", "moe", language, f.LeftOut("embed*"), "frozen", "embed*", model="moe"
    ),
    fault_case(
        "lstm-no-gradient",
        "lstm",
        language,
        f.ZeroGradient("head.*", 101),
        "frozen",
        "head*",
        model="lstm",
    ),
    fault_case(
        "diffusion-no-gradient", "diffusion", diffusion, f.ZeroGradient("2.*", 61), "frozen", "2*"
    ),
    fault_case(
        "plain-no-gradient", "plain-mlp", regression, f.ZeroGradient("2.*", 101), "frozen", "2*"
    ),
    fault_case(
        "q-no-gradient", "q-learning", q_learning, f.ZeroGradient("4.weight", 61), "frozen", "4*"
    ),
    fault_case(
        "regression-bf16-lost",
        "regression",
        lambda seed: in_bf16(regression(seed=seed, lr=2e-4)),
        Fault(),
        ("update_lost", "frozen"),
        causes=("rounding",),
    ),
    fault_case(
        "bf16-lost", "bf16", language, Fault(), ("update_lost", "frozen"), dtype="bfloat16", lr=3e-5
    ),
    fault_case(
        "bf16-sgd-lost",
        "bf16",
        language,
        Fault(),
        ("update_lost", "frozen"),
        dtype="bfloat16",
        optimizer="sgd",
        lr=3e-3,
    ),
)
WEIGHTS = (
    fault_case(
        "gpt-reset", "gpt", language, f.Reset("blocks.0.mlp*", 153), "weights_replaced", "blocks.0*"
    ),
    fault_case(
        "lstm-reset",
        "lstm",
        language,
        f.Reset("head*", 155),
        "weights_replaced",
        "head*",
        model="lstm",
    ),
    fault_case("cnn-reset", "cnn", classifier, f.Reset("9.*", 204), "weights_replaced", "9*"),
    fault_case(
        "resnet-reset",
        "resnet",
        classifier,
        f.Reset("blocks.1.*", 152),
        "weights_replaced",
        "blocks.1*",
        model="resnet",
    ),
    fault_case(
        "moe-reset",
        "moe",
        language,
        f.Reset("blocks.1.attention*", 151),
        "weights_replaced",
        "blocks.1*",
        model="moe",
    ),
    fault_case(
        "contrastive-reset",
        "contrastive",
        contrastive,
        f.Reset("net.body*", 153),
        "weights_replaced",
        "net.body*",
    ),
    fault_case(
        "regression-decay", "regression", regression, f.Decay(30.0), "weight_collapse", lr=3e-3
    ),
    fault_case("bert-decay", "bert", language, f.Decay(20.0), "weight_collapse", model="bert"),
    fault_case("gru-decay", "gru", language, f.Decay(20.0), "weight_collapse", model="gru"),
    fault_case("contrastive-decay", "contrastive", contrastive, f.Decay(50.0), "weight_collapse"),
    fault_case(
        "recommender-rows",
        "recommender",
        recommender,
        f.RowsExplode("items.weight", 101),
        "exploding_rows",
        "items*",
    ),
    fault_case(
        "gpt-rows", "gpt", language, f.RowsExplode("embed.weight", 101), "exploding_rows", "embed*"
    ),
    fault_case(
        "t5-rows",
        "t5",
        language,
        f.RowsExplode("embed.weight", 101),
        "exploding_rows",
        "embed*",
        model="t5",
        lr=2e-3,
    ),
    fault_case(
        "moe-rows",
        "moe",
        language,
        f.RowsExplode("embed.weight", 121),
        "exploding_rows",
        "embed*",
        model="moe",
    ),
    fault_case(
        "gpt-init",
        "gpt",
        language,
        f.Multiply("blocks.2.*.weight", 12.0),
        ("bad_init", "grad_imbalance"),
        "blocks.2*",
        depth=4,
    ),
    fault_case(
        "vit-init",
        "vit",
        classifier,
        f.Multiply("encoder.layers.1.*weight", 12.0),
        ("bad_init", "grad_imbalance"),
        "encoder.layers.1*",
        model="vit",
    ),
    fault_case(
        "vae-weights-jump",
        "vae",
        vae,
        f.Multiply("decoder.0.weight", 40.0, 153),
        ("weight_norm_spike", "weights_replaced"),
        "decoder*",
    ),
    fault_case(
        "q-weights-jump",
        "q-learning",
        q_learning,
        f.Multiply("2.weight", 40.0, 151),
        ("weight_norm_spike", "weights_replaced"),
        "2*",
    ),
)
