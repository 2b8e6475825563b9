"""Rules: functions of records that return findings, which become alerts with advice."""

from importlib import import_module
from typing import Final

from distmon.rules.base import Rule
from distmon.rules.engine import RuleEngine, configure
from distmon.rules.user_rules import rule, with_users_rules

RULE_MODULES: Final = (
    "nonfinite",
    "replicas",
    "learning_rate",
    "training_loop",
    "data",
    "norm_mismatch",
    "weight_changes",
    "weight_decay",
    "progress",
    "loss",
    "gradients",
    "layer_gradients",
    "gain",
    "activations",
    "attention",
    "experts",
    "spectra",
    "weights",
    "frozen",
    "rounding",
    "updates",
    "skipped_steps",
    "convergence",
    "evaluations",
    "generalization",
    "second_evaluation",
    "tasks",
    "speed",
    "devices",
)
"""Modules of this folder that have RULES, most urgent first."""
BUILTIN: Final[tuple[Rule, ...]] = tuple(
    each for module in RULE_MODULES for each in import_module(f"distmon.rules.{module}").RULES
)
"""All built-in rules, most urgent first."""

__all__ = ["BUILTIN", "RuleEngine", "configure", "rule", "with_users_rules"]
