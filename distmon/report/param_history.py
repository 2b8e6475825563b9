"""The history of every parameter, in bounded size: heat map, lines, percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distmon.report.downsampling import StreamingGrid
from distmon.report.encoding import packed, short_name

RATIO: Final = "update_ratio"
NORMS: Final = ("grad_norm", "weight_norm")
DETAILS: Final = (
    *("grad_min", "grad_p25", "grad_p50", "grad_p75", "grad_p95", "grad_p99", "grad_max"),
    *("grad_zero_fraction", "update_lost_fraction", "lr"),
)
METRICS: Final = (RATIO, *NORMS, *DETAILS)
NOT_FINITE: Final = ("grad_nan", "grad_inf", "weight_nan", "weight_inf")

MOST_PARAMETERS: Final = 200_000
"""Parameters whose history is kept; a grid of them takes 1.3 GB."""
MAX_ROWS: Final = 20_000
"""Parameters that are embedded."""
RATIO_CELLS: Final = 720_000
NORM_CELLS: Final = 320_000
"""Cells of each heat map that are embedded, 2.7 bytes each."""
MAX_COLUMNS: Final = 400
DETAILED: Final = 250
"""Parameters with percentiles."""
DETAIL_COLUMNS: Final = 128


@dataclass(frozen=True)
class Layout:
    """The parameters of a view, by name."""

    shown: list[str]
    detailed: list[str]


class ParamHistory:
    """Collects batches of `params.arrow`, and returns what fits into a view."""

    def __init__(self, declared: Sequence[Mapping[str, Any]]) -> None:
        self._declared = {str(entry["name"]): entry for entry in declared[:MOST_PARAMETERS]}
        self._rows = {name: row for row, name in enumerate(self._declared)}
        columns = int(min(MAX_COLUMNS, max(64, 640_000 // max(1, len(self._rows)))))
        self._grid = StreamingGrid(METRICS, len(self._rows), columns)
        self._names: tuple[Any, NDArray[np.int64]] | None = None
        self.observations = 0
        self.layout: Layout | None = None
        """Which parameters the last view has."""

    def add(self, batches: Iterable[Any]) -> None:
        """Take in batches; one may hold several observations."""
        for batch in batches:
            for step, part in _observations(batch):
                rows, values = self._rows_of(part), _values(part)
                kept = rows >= 0
                self._grid.add(step, rows[kept], values[:, kept])
                self.observations += 1

    def _rows_of(self, part: Any) -> NDArray[np.int64]:
        names = part["name"]
        if self._names is None or not self._names[0].equals(names):
            listed = names.to_pylist()
            for name in listed:
                if len(self._rows) < MOST_PARAMETERS:
                    self._rows.setdefault(name, len(self._rows))
            self._grid.grow(len(self._rows))
            self._names = names, np.array([self._rows.get(name, -1) for name in listed], np.int64)
        return self._names[1]

    def view(
        self,
        named: Iterable[str] = (),
        globs: Sequence[str] = (),
        layout: Layout | None = None,
    ) -> dict[str, Any]:
        """Return the parameters in the order of the model.

        Percentiles are those of the parameters that `globs` and alerts (`named`) name, then of the
        largest and smallest update ratios, then of others spread over the depth; or those of the
        `layout` of an earlier view, which this one continues.
        """
        names = [*self._rows]
        if not self.observations:
            return {"names": [], "total": len(names), "grids": {}, "detailed": [], "details": {}}
        if layout is None:
            last = self._grid.means(RATIO, np.arange(len(names)), 1)[1][:, 0]
            order = _by_interest(names, last, [*named], globs)
            shown, detailed = np.sort(order[:MAX_ROWS]), np.sort(order[:DETAILED])
            layout = Layout([names[r] for r in shown], [names[r] for r in detailed])
        else:
            for name in layout.shown:
                self._rows.setdefault(name, len(self._rows))
            self._grid.grow(len(self._rows))
            names = [*self._rows]
            shown, detailed = (
                np.array([self._rows[name] for name in chosen], np.int64)
                for chosen in (layout.shown, layout.detailed)
            )
        self.layout = layout
        place = {int(row): at for at, row in enumerate(shown)}
        grids = {
            RATIO: self._encoded(RATIO, shown, RATIO_CELLS),
            **{metric: self._encoded(metric, shown, NORM_CELLS) for metric in NORMS},
        }
        details = {
            metric: self._encoded(metric, detailed, len(detailed) * DETAIL_COLUMNS)
            for metric in METRICS
        }
        return {
            "names": [short_name(names[row]) for row in shown],
            "shapes": [self._shape(names[row]) for row in shown],
            "total": len(names),
            "observations": self.observations,
            "grids": grids,
            "detailed": [place[int(row)] for row in detailed],
            "details": {metric: grid for metric, grid in details.items() if grid is not None},
        }

    def by_name(self, metric: str, columns: int) -> tuple[list[int], dict[str, Any]]:
        """Return the last step of each column, and the means of every parameter."""
        steps, means = self._grid.means(metric, np.arange(len(self._rows)), columns)
        return steps, dict(zip(self._rows, means, strict=True))

    def _encoded(self, metric: str, rows: NDArray[np.int64], cells: int) -> dict[str, Any] | None:
        columns = min(MAX_COLUMNS, max(8, cells // max(1, len(rows))))
        steps, means = self._grid.means(metric, rows, columns)
        if np.isnan(means).all():
            return None
        return {"steps": steps, "rows": len(rows), "data": packed(means)}

    def _shape(self, name: str) -> str:
        entry = self._declared.get(name, {})
        sizes = [*entry.get("shape", ())]
        return " x ".join(map(str, sizes)) + (f" {entry['dtype']}" if "dtype" in entry else "")


def _observations(batch: Any) -> Iterator[tuple[int, Any]]:
    steps, attempts = (batch[key].to_numpy() for key in ("step", "attempt"))
    if not len(steps):
        return
    changes = (np.diff(steps) != 0) | (np.diff(attempts) != 0)
    edges = [0, *(int(at) + 1 for at in np.flatnonzero(changes)), len(steps)]
    for begin, end in pairwise(edges):
        yield int(steps[begin]), batch.slice(begin, end - begin)


def _values(part: Any) -> NDArray[np.float64]:
    """Return the metrics of one observation by parameter; Inf where a NaN or Inf was found."""
    present = set(part.schema.names)
    values = np.full((len(METRICS), part.num_rows), np.nan)
    for at, metric in enumerate(METRICS):
        if metric in present:
            values[at] = part[metric].to_numpy(zero_copy_only=False)
    found = np.zeros(part.num_rows)
    for metric in NOT_FINITE:
        if metric in present:
            found += np.nan_to_num(part[metric].to_numpy(zero_copy_only=False))
    bad = found > 0
    for at in range(1 + len(NORMS)):
        values[at][bad & np.isnan(values[at])] = np.inf
    return values


def _by_interest(
    names: Sequence[str], ratios: NDArray[np.float64], named: Sequence[str], globs: Sequence[str]
) -> NDArray[np.int64]:
    """Return all rows: first those that were asked for, then the extremes, then an even spread."""
    asked = [row for row, name in enumerate(names) if any(fnmatchcase(name, g) for g in globs)]
    rows = {name: row for row, name in enumerate(names)}
    asked += [rows[name] for name in named if name in rows]
    measured = np.flatnonzero(~np.isnan(ratios))
    by_ratio = measured[np.argsort(ratios[measured], kind="stable")]
    quarter = DETAILED // 4
    spread = np.linspace(0, len(names) - 1, min(len(names), DETAILED)).astype(np.int64)
    order = [*asked, *by_ratio[::-1][:quarter], *by_ratio[:quarter], *spread, *range(len(names))]
    return np.array([*dict.fromkeys(int(row) for row in order)], np.int64)
