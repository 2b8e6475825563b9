"""Read the shape of a model from its config, and check it against the model's layers.

A config alone does not tell whether the MLP is gated, or whether the model has adapters, experts or
a vision tower. So the weights of the linear layers are counted: if they do not match the config,
the formula does not apply and there is no MFU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from distmon.collect.telemetry.mfu.formula import TransformerShape
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

# The names that model families use, the most common first.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim", "width"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "kv_heads"),
    "head_size": ("head_dim", "head_size"),
    "mlp": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "mlp"),
}
_REQUIRED = ("layers", "width", "heads", "vocabulary")
_ATTENTION_OVER_ALL = {"full_attention", "sliding_attention"}
_INSTEAD = "set mfu.model, mfu.flops_per_token or mfu.count"
# Padded vocabularies and small extra heads; experts and adapters are far outside.
_TOLERANCE = 0.01


def shape_from_config(config: object, context: int, gated: bool) -> TransformerShape:
    """Return the shape that a config describes (Hugging Face, nanoGPT and others, by field name).

    `context` is the length of the training sequences; a config has only the maximum. Raises
    MfuUnavailableError for a config that the formula does not cover.
    """
    fields = {name: _field(config, names) for name, names in _NAMES.items()}
    missing = [name for name in _REQUIRED if fields[name] is None]
    if missing:
        raise MfuUnavailableError(
            f"no MFU: {type(config).__name__} does not have the model's {', '.join(missing)}; "
            f"{_INSTEAD}"
        )
    window = _field(config, ("sliding_window",))
    if window and window < context and getattr(config, "use_sliding_window", True):
        raise MfuUnavailableError(
            f"no MFU: the attention window is {window} of {context} tokens, and the formula counts "
            f"all of them; {_INSTEAD}"
        )
    unusual = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_OVER_ALL
    if unusual:
        raise MfuUnavailableError(
            f"no MFU: there is no formula for layers of {', '.join(sorted(unusual))}; {_INSTEAD}"
        )
    return TransformerShape(context=context, gated=gated, **fields)


def shape_of_model(
    model: nn.Module, context: int, config: object | None = None
) -> TransformerShape:
    """Return the shape of a whole, trainable model; `config` defaults to that of the model.

    For a pipeline stage, set `mfu.model` instead.
    """
    config = config if config is not None else _config_of(model)
    found = _linear_weights(model)
    plain = shape_from_config(config, context, gated=False)
    shape = min(
        (plain, replace(plain, gated=True)), key=lambda each: abs(each.matmul_weights - found)
    )
    if abs(shape.matmul_weights - found) > _TOLERANCE * shape.matmul_weights:
        raise MfuUnavailableError(
            f"no MFU: the model's linear layers have {found:.4g} weights, but a transformer of its "
            f"config has {plain.matmul_weights:.4g}; {_INSTEAD}"
        )
    return shape


def _linear_weights(model: nn.Module) -> int:
    total = 0
    for name, module in model.named_modules():
        shape = _matrix_of(module)
        if shape is not None:
            total += shape[0] * shape[1]
            if not all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                raise MfuUnavailableError(
                    f"no MFU: {name} is frozen, and 6N counts the gradient of every weight; "
                    "set mfu.flops_per_token or mfu.count"
                )
        elif not isinstance(module, nn.Embedding):
            for parameter_name, parameter in module.named_parameters(name, recurse=False):
                if parameter.ndim > 1:
                    raise MfuUnavailableError(
                        f"no MFU: there is no formula for {parameter_name}, which belongs to "
                        f"neither a linear layer nor an embedding; {_INSTEAD}"
                    )
    return total


def _matrix_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the sizes of a linear layer, which are known even while its weight is sharded."""
    for first, second in (("in_features", "out_features"), ("nx", "nf")):  # the latter: GPT-2
        rows, columns = getattr(module, first, None), getattr(module, second, None)
        if isinstance(rows, int) and isinstance(columns, int):
            return rows, columns
    return None


def _config_of(model: nn.Module) -> object:
    for config in _configs(model):
        if all(_field(config, _NAMES[name]) is not None for name in _REQUIRED):
            return config
    raise MfuUnavailableError(f"no MFU: the model has no config with its shape; {_INSTEAD}")


def _configs(model: nn.Module) -> Iterator[object]:
    """Yield the configs of the model and of its submodules."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            yield config


def _field(config: object, names: tuple[str, ...]) -> Any:
    """Return the value of the first of `names` that the config has and that is not None."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
