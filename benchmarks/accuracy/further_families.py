"""Families beyond the default ones, for `--families`: no sampling design was chosen on them."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from .batches import CLASSES, images, interactions, words
from .families import Built, family, next_word_loss

FURTHER: Final = ("mamba", "clip", "whisper", "dlrm", "gnn", "unet")
_NODES: Final = 20_000
_RELATIONS: Final = 40
_END_OF_TEXT: Final = 49_407


@family(words(20_000))
def mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=20_000, hidden_size=96, num_hidden_layers=2, state_size=8)
    model = MambaForCausalLM(config)
    return model, next_word_loss(model)


@family(words(_END_OF_TEXT + 1))
def clip() -> Built:
    """Every text ends with the same token, whose row has most of the embedding's gradient."""
    from transformers import CLIPConfig, CLIPModel

    common = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {
        **common,
        "vocab_size": _END_OF_TEXT + 1,
        "max_position_embeddings": 64,
        "eos_token_id": _END_OF_TEXT,
    }
    vision = {**common, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([ids[:, :31], torch.full_like(ids[:, :1], _END_OF_TEXT)], 1)
        ids = torch.cat([ids, ids.flip(1)])  # at least two texts to tell apart
        pixels = torch.randn(len(ids), 3, 32, 32).to(model.logit_scale.dtype)
        return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss

    return model, loss


@family(words(51_865))
def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=50,
        max_target_positions=64,
        num_mel_bins=40,
        dropout=0.0,
    )
    model = WhisperForConditionalGeneration(config)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        ids = ids[:8]
        sound = torch.randn(len(ids), 40, 100).to(model.proj_out.weight.dtype)
        return model(input_features=sound, labels=ids).loss

    return model, loss


class _Dlrm(nn.Module):
    """Six tables of very different sizes, and an MLP on dense features."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (300_000, 40_000, 5000, 700, 50, 12)
        self.tables = nn.ModuleList(nn.Embedding(size, 16) for size in sizes)
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(7 * 16, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        found = [
            table((users * (k + 1) + items * k) % table.num_embeddings)
            for k, table in enumerate(self.tables)
        ]
        dense = torch.stack([users % (k + 2) for k in range(13)], -1) / 7
        found.append(self.bottom(dense.to(found[0].dtype)))
        score: torch.Tensor = self.top(torch.cat(found, -1))
        return score.squeeze(-1)


@family(interactions(100_000, 50_000))
def dlrm() -> Built:
    model = _Dlrm()

    def loss(users: torch.Tensor, items: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        score = model(users, items)
        return F.binary_cross_entropy_with_logits(score, clicked.to(score.dtype))

    return model, loss


class _GraphNetwork(nn.Module):
    """Embeddings of nodes and their neighbors, and one matrix for each kind of relation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_NODES, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.relations = nn.Parameter(torch.randn(_RELATIONS, 64, 64) * 0.1)
        self.head = nn.Linear(64, 10)
        fixed = torch.Generator().manual_seed(5)
        self.neighbors = torch.randint(0, _NODES, (_NODES, 5), generator=fixed)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.neighbors[nodes]).mean(1) + self.embed(nodes)
        x = x + torch.einsum("bi,bij->bj", x, self.relations[nodes % _RELATIONS])
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        logits: torch.Tensor = self.head(x)
        return logits


@family(interactions(_NODES, _NODES))
def gnn() -> Built:
    model = _GraphNetwork()
    return model, lambda nodes, labels, _: F.cross_entropy(model(nodes), labels % 10)


class _UNet(nn.Module):
    """Strided and transposed convolutions with GroupNorm, told the class."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        pairs = [*pairwise(widths)]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.GroupNorm(8, b) for _, b in pairs)
        self.embed = nn.Embedding(CLASSES, 128)
        ups = ((128, 64), (128, 32), (64, 3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in ups)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, kept = pixels, []
        for down, norm in zip(self.down, self.norms, strict=True):
            x = F.silu(norm(down(x)))
            kept.append(x)
        x = F.silu(self.up[0](x + self.embed(labels)[:, :, None, None]))
        x = F.silu(self.up[1](torch.cat([x, kept[1]], 1)))
        denoised: torch.Tensor = self.up[2](torch.cat([x, kept[0]], 1))
        return denoised


@family(images(tokens_per_image=16))
def unet() -> Built:
    model = _UNet()
    return model, lambda x, labels: F.mse_loss(model(x + torch.randn_like(x), labels), x)
