"""Two tasks on one trunk: the next byte, and what kind of character it is."""

from __future__ import annotations

import string

import torch
from gpt import loss_of

KINDS = (string.ascii_letters, string.digits, " \t", "\r\n", "()[]{}")
"""Characters of each kind; all others are one more."""
KIND_COUNT = len(KINDS) + 1


class Tasks:
    """What the outputs of the model are trained on.

    With a `kind_weight`, the last `KIND_COUNT` outputs are those of the second head.
    """

    def __init__(self, device: torch.device, kind_weight: float | None) -> None:
        kinds = torch.full((256,), len(KINDS))
        for number, characters in enumerate(KINDS):
            kinds[list(characters.encode())] = number
        self._kind_of_byte = kinds.to(device)
        self._kind_weight = kind_weight

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weighted loss of each task; the model is trained on their sum."""
        if self._kind_weight is None:
            return {"byte": loss_of(outputs, targets)}
        bytes_, kinds = outputs.tensor_split([-KIND_COUNT], dim=-1)
        return {
            "byte": loss_of(bytes_, targets),
            "kind": loss_of(kinds, self._kind_of_byte[targets]) * self._kind_weight,
        }

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        return torch.stack([*self.losses(outputs, targets).values()]).sum()
