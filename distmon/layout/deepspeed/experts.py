"""Mixture of experts: map each rank's expert numbers, which start at 0, to global ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distmon.layout.names import clean_name


class WholeModelNames:
    """Maps the name of a parameter on this rank to its name in the whole model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._first: dict[str, int] = {}
        """Global number of this rank's first expert, by the name prefix of the layer's experts."""
        for path, module in model.named_modules():
            layer: Any = getattr(module, "deepspeed_moe", None)
            group = getattr(layer, "ep_group", None)
            if group is None or not hasattr(layer, "num_local_experts"):
                continue
            rank = dist.get_process_group_ranks(group).index(dist.get_rank())
            prefix = f"{path}." if path else ""
            experts = clean_name(f"{prefix}deepspeed_moe.experts.deepspeed_experts")
            self._first[experts] = rank * layer.num_local_experts

    def __call__(self, name: str) -> str:
        for experts, first in self._first.items():
            if name.startswith(f"{experts}."):
                number, dot, rest = name.removeprefix(f"{experts}.").partition(".")
                if number.isdigit():
                    return f"{experts}.{int(number) + first}{dot}{rest}"
        return name
