"""The faulty runs of the second corpus, and the alert that each has to have."""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.distributed import data_parallel
from benchmarks.alarms.kinds.generative import diffusion, flow, gan, vae
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import actor_critic, policy_gradient, q_learning
from benchmarks.alarms.kinds.representation import byol, contrastive, finetune
from benchmarks.alarms.kinds.setup import Fault, Setup, warmup_cosine
from benchmarks.alarms.kinds.tabular import grokking, multitask, recommender, regression
from benchmarks.alarms.kinds.vision import classifier
from benchmarks.alarms.scenarios import Expectation

DIVERGES = (
    *("gain_absolute", "gain_drift", "grad_norm_high", "grad_imbalance", "update_ratio_high"),
    *("loss_spike", "loss_divergence", "weight_norm_spike", "nonfinite", "lr_check"),
)
"""Rules that see training get out of hand."""
STARVED = ("not_learning", "update_ratio_low", "update_lost", "lr_zero")
"""Rules that see that nothing is learned."""
COSINE = warmup_cosine(300)


def fault_case(
    name: str,
    kind: str,
    make: object,
    fault: Fault,
    rules: tuple[str, ...] | str,
    place: str = "",
    causes: tuple[str, ...] = (),
    steps: int = 300,
    from_step: int = 1,
    within: int = 10**9,
    has_signal: bool = True,
    **options: object,
) -> Case:
    """Return a run with a planted fault, and the alert that has to name it."""

    def build(seed: int) -> Setup:
        setup: Setup = make(seed=seed, **options)  # type: ignore[operator]
        return setup

    wanted = (rules,) if isinstance(rules, str) else rules
    begin = max(from_step, getattr(fault, "at", 0))
    expected = Expectation(wanted, place, (begin, begin + within))
    ranks = 2 if kind.startswith("ddp") else 1
    return Case(name, kind, build, steps, 10, lambda: fault, expected, has_signal, causes, ranks)


LR = ("learning rate",)
FAULTY = (
    # The learning rate.
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
    # The loop.
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
    # Parameters that do not learn.
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
    # Weights.
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
    # Gradients and layers.
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
    # Data.
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
    # Ranks.
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
    # Without a signal: what would show it is not measured.
    fault_case(
        "byol-collapse",
        "byol",
        byol,
        Fault(),
        ("loss_plateau",),
        has_signal=False,
        momentum=0.0,
        lr=0.05,
    ),
    fault_case(
        "policy-no-exploration",
        "policy-gradient",
        policy_gradient,
        Fault(),
        ("loss_plateau",),
        has_signal=False,
        lr=0.1,
        entropy=0.0,
    ),
    fault_case(
        "moe-one-expert",
        "moe",
        language,
        f.Multiply("*.router.weight", 60.0),
        ("frozen",),
        has_signal=False,
        model="moe",
    ),
)


def in_bf16(setup: Setup) -> Setup:
    """Return the same with bf16 weights, without float32 copies."""
    import torch

    net, loss = setup.models[0].to(torch.bfloat16), setup.loss
    setup.loss = lambda given: loss(tuple(part.to(torch.bfloat16) for part in given)).float()
    setup.models = [net]
    return setup
