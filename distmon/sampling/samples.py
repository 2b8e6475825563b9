"""The samples of all parameters. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from distmon.sampling.sample import Design, Sample


class Samples(Sequence[Sample]):
    """Samples by parameter, each made on request.

    Large models have 100 000 parameters of a few designs: what is kept of each is its name.
    """

    def __init__(self, names: Sequence[str], designs: Iterable[Sample]) -> None:
        self.names = names
        self.designs = [*designs]
        """A sample of each parameter's design, whatever its name: one for all that are alike."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Samples:
        """Return samples that were made one by one."""
        return cls([sample.name for sample in samples], samples)

    def __len__(self) -> int:
        return len(self.designs)

    @overload
    def __getitem__(self, index: int, /) -> Sample: ...

    @overload
    def __getitem__(self, index: slice, /) -> Samples: ...

    def __getitem__(self, index: int | slice, /) -> Sample | Samples:
        if isinstance(index, slice):
            return Samples(self.names[index], self.designs[index])
        like = self.designs[index]
        return Sample(
            self.names[index],
            like.numel,
            like.seed,
            like.row_strata,
            like.cell_strata,
            like.rows,
            like.run,
        )

    def by_design(self) -> dict[Design, list[int]]:
        """Return the parameters of each design."""
        together: dict[Design, list[int]] = {}
        for i, like in enumerate(self.designs):
            together.setdefault(like.design, []).append(i)
        return together
