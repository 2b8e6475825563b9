"""What the modes that cut the model have in common: a norm over the pieces of all ranks."""

from __future__ import annotations

import functools

import torch
from arrangement import Arrangement
from gpt import GPT
from torch import nn


class InPieces(Arrangement):
    """No rank has all gradients, and some may be on several ranks."""

    def compile_blocks(self, model: GPT) -> None:
        """Compile in place, if asked for; before wrapping, which works on each block too."""
        if self.conditions.compile:
            for block in model.blocks:
                block.compile()

    def gradient_norm(self) -> torch.Tensor:
        # Every rank takes part, also one that has no gradient at all.
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for copies, parameters in self._by_copies.items():
            pieces = [self.local(each.grad) for each in parameters if each.grad is not None]
            if pieces:
                # So that what several ranks hold counts once in the sum over ranks.
                square += nn.utils.get_total_norm(pieces).double() ** 2 / copies
        return self.ranks.total(square).sqrt().float()

    @functools.cached_property
    def _by_copies(self) -> dict[int, list[nn.Parameter]]:
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(self.holdings.copies(name), []).append(parameter)
        return groups

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                self.local(parameter.grad).mul_(factor)
