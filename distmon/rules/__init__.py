"""Pure functions of records that say what is wrong, where, and what to do."""

from distmon.rules import (
    convergence,
    devices,
    evaluations,
    frozen,
    gain,
    gradients,
    loss,
    nonfinite,
    replicas,
    skipped,
    speed,
    tasks,
    updates,
    weights,
)
from distmon.rules.engine import RuleEngine, configure
from distmon.rules.user import rule, with_users_rules

BUILTIN = (
    *nonfinite.RULES,
    *replicas.RULES,
    *loss.RULES,
    *gradients.RULES,
    *gain.RULES,
    *weights.RULES,
    *frozen.RULES,
    *updates.RULES,
    *skipped.RULES,
    *convergence.RULES,
    *evaluations.RULES,
    *tasks.RULES,
    *speed.RULES,
    *devices.RULES,
)
"""All rules that come with distmon, most urgent first."""

__all__ = ["BUILTIN", "RuleEngine", "configure", "rule", "with_users_rules"]
