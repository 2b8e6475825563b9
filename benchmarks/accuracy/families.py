"""The families of models, each a function that returns a model and its loss.

Widths are small; vocabularies are real, since they decide how a gradient lies in its tensor.
Nothing is downloaded: weights are random. Dropout is off, so that a run can be repeated; models
stay in training mode, which BatchNorm needs. To add a family, write one more `@family` function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from .batches import CLASSES, IMAGE, BatchSource, images, interactions, masked_words, words
from .own_models import LstmLanguageModel, Recommender, ResNet

Loss = Callable[..., torch.Tensor]
"""Called with the tensors of a batch."""
Built = tuple[nn.Module, Loss]

WIDTH: Final = 128
LAYERS: Final = 4
HEADS: Final = 4
USERS: Final = 100_000
ITEMS: Final = 50_000


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    name: str
    batch: BatchSource
    build: Callable[[], Built]
    """Returns the model in training mode and `loss(*batch)`."""


FAMILIES: Final[dict[str, Family]] = {}


def family(batch: BatchSource) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register a function as the family of its name, trained on such batches."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        FAMILIES[build.__name__] = Family(build.__name__, batch, build)
        return build

    return register


def next_word_loss(model: nn.Module) -> Loss:
    """Return the loss of a Hugging Face language model, which shifts the labels itself."""
    return lambda ids: model(input_ids=ids, labels=ids).loss


@family(words(50257))
def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # as it would assume, after a warning
    return model, next_word_loss(model)


@family(words(32000))
def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model = LlamaForCausalLM(config)
    return model, next_word_loss(model)


@family(masked_words(30522))
def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    return model, lambda ids, labels: model(input_ids=ids, labels=labels).loss


@family(words(32128))
def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS // 2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        """Read the first half of a sequence and write the second."""
        read, write = ids.chunk(2, dim=1)
        return model(input_ids=read, labels=write.contiguous()).loss

    return model, loss


@family(words(32000))
def mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
    )
    model = MixtralForCausalLM(config)
    return model, next_word_loss(model)


@family(images(tokens_per_image=64))
def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=IMAGE,
        patch_size=4,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config)
    return model, lambda pixels, labels: F.cross_entropy(model(pixels).logits, labels)


@family(images(tokens_per_image=16))
def resnet() -> Built:
    model = ResNet((32, 64, 128), CLASSES)
    return model, lambda pixels, labels: F.cross_entropy(model(pixels), labels)


@family(words(33278))
def lstm() -> Built:
    model = LstmLanguageModel(33278, WIDTH, layers=2)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return model, loss


@family(interactions(USERS, ITEMS))
def recommender() -> Built:
    model = Recommender(USERS, ITEMS, width=32)

    def loss(users: torch.Tensor, items: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        score = model(users, items)
        return F.binary_cross_entropy_with_logits(score, clicked.to(score.dtype))

    return model, loss
