"""Pure functions of records that say what is wrong, where, and what to do."""

from distmon.rules import frozen, loss, nonfinite, replicas, skipped, updates
from distmon.rules.engine import RuleEngine, configure
from distmon.rules.user import rule, with_users_rules

BUILTIN = (
    *nonfinite.RULES,
    *replicas.RULES,
    *frozen.RULES,
    *updates.RULES,
    *loss.RULES,
    *skipped.RULES,
)
"""All rules that come with distmon, most urgent first."""

__all__ = ["BUILTIN", "RuleEngine", "configure", "rule", "with_users_rules"]
