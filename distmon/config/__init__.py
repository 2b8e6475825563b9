"""The configuration: one pydantic model, read from a dict, a YAML or JSON file, or the environment.

A mistake in any of them is one `ConfigError` sentence that names the key and, for an unknown key,
the nearest valid one.
"""

from distmon.config.loading import load_config, read_config_file
from distmon.config.mistakes import explain, suggest
from distmon.config.sections import (
    SINKS,
    ActionsConfig,
    GradientGainConfig,
    InsideConfig,
    LossConfig,
    MfuConfig,
    ModelConfig,
    NotifyConfig,
    PrometheusConfig,
    RuleConfig,
    WandbConfig,
    split_urls,
)
from distmon.config.settings import MonitorConfig

__all__ = [
    "SINKS",
    "ActionsConfig",
    "GradientGainConfig",
    "InsideConfig",
    "LossConfig",
    "MfuConfig",
    "ModelConfig",
    "MonitorConfig",
    "NotifyConfig",
    "PrometheusConfig",
    "RuleConfig",
    "WandbConfig",
    "explain",
    "load_config",
    "read_config_file",
    "split_urls",
    "suggest",
]
