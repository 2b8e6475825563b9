"""Weights and optimizer state, whole and under plain names, whatever piece each rank holds.

So a checkpoint of one mode can be resumed in any other, on any number of ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from arrangement import Arrangement
from holdings import Place


class WholeState(NamedTuple):
    """What a checkpoint holds of model and optimizer, on the CPU."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    """State by name of the parameter, then by name of the state."""


class _Piece(NamedTuple):
    place: Place
    weight: torch.Tensor
    state: dict[str, Any]


def gather_state(arrangement: Arrangement, optimizer: torch.optim.Optimizer) -> WholeState | None:
    """The whole state on rank 0, None elsewhere. A collective.

    One message per rank, whatever the state holds: a rank on which a parameter never had a gradient
    has no state for it, and a collective per tensor would wait for that rank for ever.
    """
    ranks, mine = arrangement.ranks, _own_pieces(arrangement, optimizer)
    pieces = [mine]
    if ranks.grouped and ranks.world > 1:
        pieces = [{} for _ in range(ranks.world)]
        # Rank 0 keeps its own: nothing of it has to be copied.
        dist.gather_object({} if ranks.is_main else mine, pieces if ranks.is_main else None)
        pieces[0] = mine
    if not ranks.is_main:
        return None
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, shape in arrangement.holdings.shapes.items():
        for piece in (each[name] for each in pieces if name in each):
            _put(weights, name, piece.weight, piece.place, shape)
            for key, value in piece.state.items():
                _put(states.setdefault(name, {}), key, value, piece.place, shape)
    weights |= {alias: weights[name] for alias, name in arrangement.aliases.items()}
    return WholeState(weights, states)


def _own_pieces(arrangement: Arrangement, optimizer: torch.optim.Optimizer) -> dict[str, _Piece]:
    rank, holdings, local = arrangement.ranks.rank, arrangement.holdings, arrangement.local
    pieces = {}
    for name, place in holdings.places[rank].items():
        if not holdings.is_first(name, rank):
            continue
        parameter = arrangement.parameters[name]
        state = {
            key: _on_cpu(local(value) if value.ndim else value) if torch.is_tensor(value) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        pieces[name] = _Piece(place, _on_cpu(local(parameter)), state)
    return pieces


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # A view drags all it is a view of through pickle.
    return tensor.detach().cpu().clone()


def _put(content: dict[str, Any], key: str, value: Any, place: Place, shape: torch.Size) -> None:
    """Put a piece into the whole tensor; what is no piece, such as a step count, stays as it is."""
    if not torch.is_tensor(value) or tuple(value.shape) != place.size:
        content[key] = value
        return
    if key not in content:
        content[key] = torch.zeros(shape, dtype=value.dtype)
    place.within(content[key]).copy_(value)


def restore_optimizer(
    saved: dict[str, dict[str, Any]], arrangement: Arrangement, optimizer: torch.optim.Optimizer
) -> None:
    """Give every parameter's piece its part of the saved state. No collective."""
    shapes, places = arrangement.holdings.shapes, arrangement.holdings.places
    for name, place in places[arrangement.ranks.rank].items():
        parameter = arrangement.parameters[name]
        for key, value in saved.get(name, {}).items():
            if torch.is_tensor(value) and value.shape == shapes[name]:
                state = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                arrangement.local(state).copy_(place.within(value))
            else:
                state = value.clone() if torch.is_tensor(value) else value
            optimizer.state[parameter][key] = state
