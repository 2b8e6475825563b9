"""Spectral norms of matrices that are distributed over ranks.

Lanczos iteration on W'W: each product with W or W' is a partial one on every rank, and one
reduction makes it whole. A sweep is a generator, as a search is: it yields what must have happened
before it goes on, so no rank waits in it. It begins with the singular vector of the last sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.collect.inside.matrix_products import ShardProducts
from distmon.device import DeviceMark, is_accelerator, pinned, to_device
from distmon.sampling.sample import hash48

Floats = NDArray[np.float64]
_CONVERGED: Final = 1e-4
"""Residual, relative to the square of the singular value, from which on the next one is improved:
it may outgrow the first."""
STEPS: Final = 8
"""Products with W'W in one sweep."""


class Ready(Protocol):
    """Something that ends without being waited for."""

    def done(self) -> bool:
        """Return whether it has ended."""


Launch = Callable[[torch.Tensor], Ready]
"""Starts to add up a tensor on the host over all ranks, in place."""


@dataclass(frozen=True)
class Spectrum:
    """What a sweep found out about one matrix."""

    norm: float
    error: float
    """There is a singular value within this distance; it is the largest one, or close to it."""
    stable_rank: float


class SpectralState:
    """The right singular vectors that the next sweep begins with; the same on every rank."""

    def __init__(self) -> None:
        self.vectors: dict[str, Floats] = {}

    def start(self, name: str, columns: int) -> Floats:
        """Return the vectors [k, columns] to begin with, orthonormal."""
        known = self.vectors.get(name)
        if known is not None:
            return known
        vector = np.random.default_rng(hash48(name)).standard_normal(columns)
        return np.asarray(vector / np.linalg.norm(vector))[None]


def sweep(
    matrices: Mapping[str, ShardProducts],
    state: SpectralState,
    device: torch.device,
    launch: Launch,
) -> Generator[Ready, None, dict[str, Spectrum]]:
    """Yield what has to end first; return the spectrum of every matrix."""
    products = [*matrices.values()]
    names = [*matrices]
    counted = torch.tensor([p.elements for p in products], dtype=torch.float64)
    local = torch.stack([p.square().double() for p in products])
    total, squares = yield from _added([local.reshape(-1)], counted, device, launch)
    sizes = np.array([p.shape[0] * p.shape[1] for p in products])
    copies = np.maximum(total / sizes, 1e-9)
    frobenius = squares[0] / copies
    subspaces = [
        _Subspace(state.start(name, p.shape[1])) for name, p in zip(names, products, strict=True)
    ]
    for _ in range(STEPS):
        there = [to_device(torch.from_numpy(s.newest).float(), device) for s in subspaces]
        parts = [p.times(v) for p, v in zip(products, there, strict=True)]
        _, images = yield from _added(parts, None, device, launch)
        images = [y / c for y, c in zip(images, copies, strict=True)]
        there = [to_device(torch.from_numpy(y).float(), device) for y in images]
        parts = [p.transposed_times(y) for p, y in zip(products, there, strict=True)]
        _, backs = yield from _added(parts, None, device, launch)
        for subspace, y, z, c in zip(subspaces, images, backs, copies, strict=True):
            subspace.add(y, z / c)
    found = {}
    for name, subspace, square in zip(names, subspaces, frobenius, strict=True):
        norm, error, state.vectors[name] = subspace.best()
        found[name] = Spectrum(norm, error, float(square) / norm**2 if norm > 0 else np.nan)
    return found


def _added(
    parts: Sequence[torch.Tensor],
    counted: torch.Tensor | None,
    device: torch.device,
    launch: Launch,
) -> Generator[Ready, None, tuple[Floats, list[Floats]]]:
    """Add up vectors over all ranks; also `counted`, which is on the host."""
    flat = torch.cat([part.double() for part in parts])
    host = flat
    if is_accelerator(device):
        host = pinned(tuple(flat.shape), torch.float64)
        host.copy_(flat, non_blocking=True)
        yield DeviceMark(device)
    if counted is not None:
        host = torch.cat([counted, host])
    yield launch(host)
    values = host.numpy()
    first = 0 if counted is None else len(counted)
    ends = first + np.cumsum([len(part) for part in parts])
    return values[:first], np.split(values[first:], ends[:-1] - first)


class _Subspace:
    """Orthonormal vectors v, their images W v, and W'W v."""

    def __init__(self, start: Floats) -> None:
        self._waiting = [*start]
        self.newest = self._waiting.pop(0)
        self._vectors: list[Floats] = []
        self._images: list[Floats] = []
        self._backs: list[Floats] = []

    def add(self, image: Floats, back: Floats) -> None:
        """Add the products of the newest vector, and choose the next one."""
        if self.newest.any():
            self._vectors.append(self.newest)
            self._images.append(image)
            self._backs.append(back)
        self.newest = self._orthogonal(self._waiting.pop(0) if self._waiting else self._residual())

    def _residual(self) -> Floats:
        """Return what W'W adds to the best approximation of the largest singular vector.

        For vectors that all come from one by products with W'W, as in Lanczos iteration, that is
        the product of the newest one. After a start with vectors of an earlier sweep it is not:
        the weights have changed since, and the error of the first vector is not that of the last.
        """
        images, vectors = np.array(self._images), np.array(self._vectors)
        backs = np.array(self._backs)
        if not len(vectors) or not np.isfinite(backs).all():
            return np.zeros_like(self.newest)
        squares, weights = np.linalg.eigh(images @ images.T)
        for square, mix in zip(squares[::-1], weights.T[::-1], strict=True):
            residual = mix @ backs - square * (mix @ vectors)
            if np.linalg.norm(residual) > _CONVERGED * square:
                return np.asarray(residual)
        return np.zeros_like(self.newest)

    def _orthogonal(self, vector: Floats) -> Floats:
        """Return the part of a vector outside of the subspace, normalized; 0 without one."""
        length = np.linalg.norm(vector)
        for _ in range(2):  # once loses orthogonality
            for each in self._vectors:
                vector = vector - (each @ vector) * each
        rest = np.linalg.norm(vector)
        if not rest > 1e-6 * length:
            return np.zeros_like(vector)
        return np.asarray(vector / rest)

    def best(self) -> tuple[float, float, Floats]:
        """Return the largest singular value, its error, and two vectors for the next sweep."""
        if not self._vectors or not np.isfinite(self._images).all():
            return np.nan, np.nan, self._fresh()
        images, vectors = np.array(self._images), np.array(self._vectors)
        squares, weights = np.linalg.eigh(images @ images.T)
        norm = float(np.sqrt(max(squares[-1], 0.0)))
        vector = weights[:, -1] @ vectors
        residual = np.linalg.norm(weights[:, -1] @ np.array(self._backs) - norm**2 * vector)
        if norm <= 0:
            return 0.0, 0.0, self._fresh()
        kept = weights[:, -min(2, len(vectors)) :].T[::-1] @ vectors
        return norm, float(residual) / (2 * norm), kept

    def _fresh(self) -> Floats:
        vector = np.random.default_rng(0).standard_normal(len(self.newest))
        return np.asarray(vector / np.linalg.norm(vector))[None]
