"""FLOPs by formula agree with a count that knows nothing about the formula."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mfu_models import GPT2, GPT2_XL, LLAMA_7B, LLAMA_70B, SMALL, Decoder, products, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distmon.collect.telemetry.mfu.formula import TransformerShape
from distmon.collect.telemetry.mfu.model_shape import shape_from_config, shape_of_model
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.errors import ConfigError

SHAPES = {"GPT-2 124M": GPT2, "GPT-2 1.5B": GPT2_XL, "Llama 7B": LLAMA_7B, "Llama 70B": LLAMA_70B}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_formula_agrees_with_the_products_written_out(shape: TransformerShape) -> None:
    forward = sum(2 * rows * inner * columns for rows, inner, columns in products(shape))
    # Backward: each product has two of the same size, for the gradients of its two factors.
    assert shape.flops(causal=False).value == pytest.approx(3 * forward / shape.context, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_formula_agrees_with_torchs_counter_without_a_device(shape: TransformerShape) -> None:
    shape = replace(shape, layers=2)  # all layers are alike, and a counted one takes time
    with torch.device("meta"):
        model, ids = Decoder(shape), torch.zeros(1, shape.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        train(model, ids)
    counted = counter.get_total_flops() / shape.context
    assert shape.flops(causal=False).value == pytest.approx(counted, rel=0.01)


def test_the_causal_convention_halves_attention_only() -> None:
    full, causal = GPT2.flops(causal=False), GPT2.flops(causal=True)
    assert full.value - causal.value == 6 * 12 * 768 * 1024
    assert (causal.causal, full.causal) == (True, False)
    assert causal.description == "6N + causal attention by formula"
    assert full.description == "6N + full attention by formula"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, not 0"),
        ({"mlp": 2.5}, r"mlp must be a whole number of at least 1, not 2\.5"),
        ({"heads": 5}, "width 768 is not a multiple of its 5 heads"),
        ({"kv_heads": 5}, "12 heads are not a multiple of its 5 kv_heads"),
    ],
)
def test_an_impossible_shape_is_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(GPT2, **changes)


def test_configs_are_read_by_their_field_names() -> None:
    # As Hugging Face names them, with the fields that a config leaves open.
    llama = SimpleNamespace(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=32000,
        max_position_embeddings=131072,
        sliding_window=None,
    )
    assert shape_from_config(llama, 4096, gated=True) == LLAMA_70B
    gpt2 = SimpleNamespace(n_layer=12, n_head=12, n_embd=768, n_inner=None, vocab_size=50257)
    assert shape_from_config(gpt2, 1024, gated=False) == GPT2
    with pytest.raises(MfuUnavailableError, match=r"does not have .* layers, width"):
        shape_from_config(SimpleNamespace(n_head=12, vocab_size=50257), 1024, gated=False)


def small_config(**changes: object) -> SimpleNamespace:
    fields = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 64,
    }
    return SimpleNamespace(**(fields | changes))


def configured(shape: TransformerShape = SMALL, **changes: object) -> nn.Module:
    model = Decoder(shape)
    model.config = small_config(**changes)  # type: ignore[assignment]
    return model


def test_the_shape_of_a_model_is_found_through_its_wrapper() -> None:
    assert shape_of_model(nn.Sequential(configured()), 128) == SMALL
    plain = replace(SMALL, gated=False)
    assert shape_of_model(configured(plain), 128) == plain
    assert shape_of_model(Decoder(SMALL), 128, config=small_config()) == SMALL


def test_what_no_formula_fits_is_refused() -> None:
    def refuses(model: nn.Module, says: str) -> None:
        with pytest.raises(MfuUnavailableError, match=says):
            shape_of_model(model, 128)

    refuses(Decoder(SMALL), "has no config with its shape")
    refuses(configured(num_hidden_layers=4), r"linear layers have 2\.97e\+04 weights, but")
    refuses(configured(sliding_window=64), "attention window is 64 of 128 tokens")
    refuses(configured(layer_types=["full_attention", "mamba"]), "no formula for layers of mamba")
    frozen = configured()
    frozen.blocks[1].up = nn.Linear(32, 80)
    frozen.blocks[1].up.weight.requires_grad_(False)
    refuses(frozen, r"blocks\.1\.up is frozen")
    experts = configured()
    experts.experts = nn.Module()
    experts.experts.up = nn.Parameter(torch.zeros(4, 32, 80))
    refuses(experts, r"no formula for experts\.up")


def test_a_window_that_is_off_or_long_enough_does_not_matter() -> None:
    assert shape_of_model(configured(sliding_window=128), 128) == SMALL
    assert shape_of_model(configured(sliding_window=8, use_sliding_window=False), 128) == SMALL
