"""One diagnosis for the alerts of an observation: known causes first, no opposite advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.rules.frozen import REASONS

CAUSES: Final = (
    *("replica_desync", "lr_jump", "lr_zero", "wrong_sign", "weights_replaced", "rank_outlier"),
    *("batch_repeats", "stale_gradients", "backward_repeated", "eval_mode", "norm_mismatch"),
    *("ranks_share_data", "weight_decay_high", "update_lost", "weight_collapse"),
)
"""Rules that name a cause, the most certain first. A NaN is none: it is the end of what went wrong,
and numbers that are still finite were not made by it."""
SYMPTOMS: Final = (
    *("loss_divergence", "loss_spike", "loss_plateau", "no_improvement", "grad_norm_high"),
    *("grad_norm_decay", "grad_norm_low", "grad_imbalance", "gain_absolute", "gain_drift"),
    *("update_ratio_high", "update_ratio_low", "update_ratio_phase", "not_learning", "overfit"),
    *("weight_norm_spike", "val_increase", "slow_improvement", "eval_plateau", "underfit"),
    *("lr_check", "loss_flat", "loss_insensitive", "weight_collapse", "exploding_rows"),
    "nonfinite",
)
"""Rules that see an effect, which one of the causes may explain."""
UNSTABLE: Final = (
    *("update_ratio_high", "loss_divergence", "loss_spike", "grad_norm_high", "weight_norm_spike"),
    "gain_drift",
)
"""Rules that see training get out of hand before it ends in a NaN."""
REMEMBERED: Final = 5
"""Observations after which a cause no longer explains a new symptom."""
RAISE: Final = ("double the learning rate", "raise the learning rate")
LOWER: Final = ("halve the learning rate", "lower the learning rate")


class Diagnosis:
    """Remembers the causes of the last observations, and words the alerts by them."""

    def __init__(self) -> None:
        self._observation = 0
        self._causes: dict[str, dict[str, Any]] = {}

    def combine(
        self, alerts: Sequence[Alert], record: Record, lasting: Collection[str] = ()
    ) -> list[Alert]:
        """Return the alerts with one diagnosis; the advice of causes replaces that of symptoms.

        `lasting`: rules that still find what they have alerted of; they go on being causes.
        """
        self._observation += 1
        for name in lasting:
            if name in self._causes:
                self._causes[name]["observation"] = self._observation
        oldest = self._observation - REMEMBERED
        self._causes = {k: c for k, c in self._causes.items() if c["observation"] > oldest}
        for alert in alerts:
            if alert.rule in CAUSES + UNSTABLE and alert.severity != "info":
                begun = self._causes.get(alert.rule, {"step": alert.step})
                self._causes[alert.rule] = {
                    "observation": self._observation,
                    "step": begun["step"],
                    "advice": [*alert.advice],
                }
        explained = [self._explain(alert) for alert in alerts]
        return _without_opposites(explained, record)

    def _explain(self, alert: Alert) -> Alert:
        ranked = [name for name in CAUSES if name in self._causes and name != alert.rule]
        if alert.rule == "frozen" and REASONS["zero_gradient"].words in alert.message:
            # Units that the first steps have killed.
            return self._after_instability(alert, "the units died in it")
        if alert.rule not in SYMPTOMS:
            return alert
        if not ranked:
            nonfinite = alert.rule == "nonfinite"
            return self._after_instability(alert, "the NaN is its end") if nonfinite else alert
        first = self._causes[ranked[0]]
        others = f", or {', '.join(ranked[1:])}" if len(ranked) > 1 else ""
        own = [line for line in alert.advice if not _about_lr(line)]
        return replace(
            alert,
            message=f"{alert.message}; likely cause: {ranked[0]} at step {first['step']}{others}",
            advice=(*first["advice"], *own),
        )

    def _after_instability(self, alert: Alert, end: str) -> Alert:
        """Say what went out of hand before a NaN or dead units, with the advice for that."""
        before = [self._causes[name] | {"rule": name} for name in UNSTABLE if name in self._causes]
        if not before:
            return alert
        first = min(before, key=lambda each: each["step"])
        return replace(
            alert,
            message=f"{alert.message}; likely cause: training was unstable since step "
            f"{first['step']} ({first['rule']}), {end}",
            advice=(*first["advice"], *alert.advice),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        causes = {name: {**cause} for name, cause in self._causes.items()}
        return {"observation": self._observation, "causes": causes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._observation = int(state["observation"])
        self._causes = {str(name): {**cause} for name, cause in state["causes"].items()}


def _about_lr(line: str) -> bool:
    return any(word in line for word in (*RAISE, *LOWER))


def _without_opposites(alerts: Sequence[Alert], record: Record) -> list[Alert]:
    """Keep advice to raise the rate only where nothing advises to lower it and it is not decaying.

    An unstable run is worse than a slow one, so lowering wins.
    """
    lowers = any(any(w in line for w in LOWER) for a in alerts for line in a.advice)
    history, lr = record.history, record.metrics.get("train/lr")
    decaying = bool(lr is not None and history.lr_peak and lr < 0.9 * history.lr_peak)
    if not lowers and not decaying:
        return [*alerts]
    return [
        replace(
            alert,
            advice=tuple(x for x in alert.advice if not any(word in x for word in RAISE)),
        )
        for alert in alerts
    ]
