"""The faulty runs of the blind set, and the alert that each has to have."""

from __future__ import annotations

from torch import nn

from benchmarks.alarms.blind import decisions as d
from benchmarks.alarms.blind import generative as g
from benchmarks.alarms.blind import sequences as s
from benchmarks.alarms.blind import tables as t
from benchmarks.alarms.blind import techniques as q
from benchmarks.alarms.blind import vision as v
from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import DIVERGES, LR, STARVED, fault_case, in_bf16
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.setup import Fault, Setup, warmup_cosine

DATA = ("data", "label", "batch")
ROSE = ("loss_divergence", "loss_spike")
NONE = Fault()


def _case(
    name: str, make: object, fault: Fault, rules: object, place: str = "", **options: object
) -> Case:
    """Return a fault in the kind that the function or `kind` names."""
    kind = options.pop("kind", make.__name__.replace("_", "-"))  # type: ignore[attr-defined]
    return fault_case(name, kind, make, fault, rules, place, **options)  # type: ignore[arg-type]


def _quantiles_in_bf16(seed: int) -> Setup:
    return in_bf16(t.quantiles(seed, lr=1e-4))


BLIND_FAULTY = (
    # The learning rate.
    _case("unet-lr-high", v.unet, NONE, DIVERGES, causes=LR, optimizer="sgd", lr=5.0, clip=None),
    _case("state-space-lr-high", s.state_space, NONE, DIVERGES, causes=LR, lr=0.5),
    _case("physics-lr-high", g.physics, NONE, DIVERGES, causes=LR, lr=0.5),
    _case("translator-lr-high", s.translator, NONE, DIVERGES, causes=LR, lr=0.5),
    _case("mixer-lr-jump", v.mixer, f.LrFactor(151, 100.0), "lr_jump"),
    _case("soft-actor-lr-jump", d.soft_actor, f.LrFactor(151, 30.0), "lr_jump"),
    _case("alignment-lr-jump", s.alignment, f.LrFactor(121, 50.0), "lr_jump"),
    _case("masked-lr-zero", v.masked_autoencoder, f.LrFactor(121, 0.0), "lr_zero"),
    _case("factors-lr-zero", t.factors, f.LrFactor(151, 0.0), "lr_zero"),
    _case(
        "unet-schedule-ended",
        v.unet,
        NONE,
        ("lr_zero", "not_learning"),
        from_step=101,
        schedule=warmup_cosine(100),
    ),
    _case("detector-starved", v.detector, NONE, STARVED, causes=LR, lr=1e-8),
    _case("radiance-starved", v.radiance, NONE, STARVED, causes=LR, optimizer="sgd", lr=1e-7),
    _case("links-starved", t.links, NONE, STARVED, causes=LR, lr=3e-8),
    _case("factors-clipped", t.factors, NONE, STARVED, optimizer="sgd", lr=0.5, clip=1e-6),
    # The loop.
    _case("unet-no-zero-grad", v.unet, f.NoZeroGrad(101), "stale_gradients"),
    _case("reward-no-zero-grad", s.preferences, f.NoZeroGrad(1), "stale_gradients"),
    _case("wasserstein-no-zero-grad", g.wasserstein, f.NoZeroGrad(51), "stale_gradients"),
    _case("translator-backward-twice", s.translator, f.BackwardTwice(101), "backward_repeated"),
    _case("quantiles-backward-twice", t.quantiles, f.BackwardTwice(1), "backward_repeated"),
    _case("table-eval-mode", t.table_attention, f.EvalMode(121), "eval_mode"),
    _case("pairs-eval-mode", v.pairs, f.EvalMode(101), "eval_mode", "[14]"),
    _case(
        "dropout-eval-mode",
        q.gratings,
        f.EvalMode(101),
        "eval_mode",
        kind="dropout-half",
        dropout=0.5,
        norm=False,
    ),
    _case("overflow-always", q.scaled_gradients, NONE, "steps_skipped", skip_at=1),
    # Parameters that do not learn.
    _case("mixer-frozen", v.mixer, f.Freeze("layers.1.*"), "cannot_learn", "layers.1*"),
    _case("hypernetwork-frozen", g.hypernetwork, f.Freeze("task.*"), "cannot_learn", "task*"),
    _case("translator-left-out", s.translator, f.LeftOut("keys.*"), "frozen", "keys*"),
    _case("state-space-left-out", s.state_space, f.LeftOut("layers.0.*"), "frozen", "layers.0*"),
    _case("sets-no-gradient", t.sets, f.ZeroGradient("each.*", 101), "frozen", "each*"),
    _case(
        "policy-no-gradient", d.clipped_policy, f.ZeroGradient("policy.*", 101), "frozen", "policy*"
    ),
    _case(
        "detector-no-box",
        v.detector,
        NONE,
        ("frozen", "grad_imbalance"),
        "box*",
        weight=0.0,
        optimizer="plain-sgd",
        lr=0.1,
    ),
    _case(
        "quantiles-bf16-lost",
        _quantiles_in_bf16,
        NONE,
        ("update_lost", "frozen"),
        kind="quantiles",
        causes=("rounding",),
    ),
    # Weights.
    _case("unet-reset", v.unet, f.Reset("middle.*", 153), "weights_replaced", "middle*"),
    _case(
        "state-space-reset", s.state_space, f.Reset("layers.1.*", 155), "weights_replaced", "layer*"
    ),
    _case("words-reset", t.word_vectors, f.Reset("word.*", 204), "weights_replaced", "word*"),
    _case("codebook-decay", g.codebook, f.Decay(30.0), "weight_collapse"),
    _case("mixer-decay", v.mixer, f.Decay(20.0), "weight_collapse"),
    _case(
        "words-rows", t.word_vectors, f.RowsExplode("word.weight", 101), "exploding_rows", "word*"
    ),
    _case("links-rows", t.links, f.RowsExplode("node.weight", 121), "exploding_rows", "node*"),
    _case(
        "mixer-init",
        v.mixer,
        f.Multiply("layers.2.*.weight", 12.0),
        ("bad_init", "grad_imbalance"),
        "layers.2*",
    ),
    _case(
        "radiance-weights-jump",
        v.radiance,
        f.Multiply("2.weight", 40.0, 153),
        ("weight_norm_spike", "weights_replaced"),
        "2*",
    ),
    _case(
        "imitation-dead",
        d.imitation,
        f.Dead("2.bias", 101),
        ("grad_imbalance", "frozen", "dead_units"),
        "[02]*",
    ),
    _case(
        "quantiles-vanishing",
        t.quantiles,
        NONE,
        "grad_imbalance",
        "[0-4]*",
        depth=9,
        activation=nn.Sigmoid,
        lr=1e-3,
    ),
    # Norms and NaN.
    _case("adversarial-norm", q.adversarial, f.WrongNorm(0.5), "norm_mismatch"),
    _case(
        "alignment-norm-unscaled", s.alignment, f.WrongNorm(1024.0, 51), "norm_mismatch", clip=1e5
    ),
    _case("translator-nan", s.translator, f.Nan("keys.weight", 123), "nonfinite", "keys*"),
    _case("energy-nan", g.energy, f.Nan("2.weight", 124), "nonfinite", "2*"),
    _case(
        "wasserstein-nan", g.wasserstein, f.Nan("critic.2.weight", 123), "nonfinite", "critic.2*"
    ),
    # Data.
    _case("masked-same-batch", v.masked_autoencoder, f.SameBatch(101), "batch_repeats"),
    _case("table-same-batch", t.table_attention, f.SameBatch(121), "batch_repeats"),
    _case("score-same-batch", g.score_matching, f.SameBatch(101), "batch_repeats"),
    _case("detector-spike", v.detector, f.Garbage(203, 203, 300.0), "loss_spike", within=10),
    _case("counts-spike", t.counts, f.Garbage(203, 203), "loss_spike", within=10),
    _case("sets-spike", t.sets, f.Garbage(203, 203), "loss_spike", within=10),
    _case("state-space-garbage", s.state_space, f.Garbage(151), ROSE, causes=DATA),
    _case("mixer-shuffled", v.mixer, f.Garbage(151, shuffle=True), ROSE, causes=DATA),
    _case("unet-shuffled", v.unet, f.Garbage(151, shuffle=True), ROSE, causes=DATA),
    _case("quantiles-unit", t.quantiles, f.Unit(151), ROSE, causes=DATA),
    _case(
        "table-empty-inputs",
        t.table_attention,
        f.Garbage(151, scale=0.0),
        (*ROSE, "batch_repeats"),
        causes=DATA,
    ),
    _case(
        "few-examples",
        q.gratings,
        NONE,
        ("overfit", "val_increase"),
        kind="epochs",
        examples=32,
        evaluate_every=50,
    ),
    # Ranks.
    _case(
        "ddp-transformer-same",
        q.parallel,
        f.SameOnRanks(),
        "ranks_share_data",
        kind="ddp-transformer",
        steps=100,
    ),
    _case(
        "ddp-mixer-garbage",
        q.parallel,
        f.GarbageOnRank(81),
        "rank_outlier",
        "rank 1",
        kind="ddp-mixer",
        steps=150,
        model="mixer",
    ),
    _case(
        "ddp-transformer-desync",
        q.parallel,
        f.Desync(61),
        "replica_desync",
        "rank 1",
        kind="ddp-transformer",
        steps=100,
    ),
    _case(
        "ddp-mixer-norm",
        q.parallel,
        f.WrongNorm(0.5, by_rank=True),
        "norm_mismatch",
        kind="ddp-mixer",
        steps=100,
        model="mixer",
    ),
    # Without a signal: what would show it is not measured.
    _case(
        "distillation-collapse",
        v.self_distillation,
        NONE,
        ("loss_plateau", "dead_units"),
        has_signal=False,
        center=False,
        momentum=0.0,
        lr=0.02,
    ),
    _case(
        "clipped-no-exploration",
        d.clipped_policy,
        NONE,
        ("loss_plateau", "saturated"),
        has_signal=False,
        entropy=0.0,
        lr=0.05,
    ),
)
