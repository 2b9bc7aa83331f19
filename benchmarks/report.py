"""Figures, their comparison with a bound, and the table and the document they end up in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """One measured value; `what` says of what, in a word or two."""

    value: float
    unit: str
    what: str

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 2 if self.value >= 1 else 3
        number = f"{self.value:,.{digits}f}"
        if self.unit.startswith("/"):
            return f"{number}{self.unit} {self.what}"
        return " ".join(part for part in (number, self.unit, self.what) if part)


@dataclass(frozen=True)
class Bound:
    """What a ratio is required to be."""

    kind: Literal["at least", "at most"]
    ratio: float

    def is_kept_by(self, ratio: float) -> bool:
        """Whether the ratio is on the right side."""
        return ratio >= self.ratio if self.kind == "at least" else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'>=' if self.kind == 'at least' else '<='} {self.ratio:g}"


@dataclass(frozen=True)
class Finding:
    """One line of the table: median figures, and a ratio per round. Without a bound it is for information."""

    what: str
    measured: Figure
    against: Figure | None = None
    ratios: tuple[float, ...] = ()
    bound: Bound | None = None
    against_text: str = ""

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios."""
        return median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.bound is None or self.ratio is None:
            return ""
        return "ok" if self.bound.is_kept_by(self.ratio) else "NOT OK"

    @property
    def is_missed(self) -> bool:
        """Whether this line fails the run."""
        return self.verdict == "NOT OK"

    def cells(self) -> tuple[str, ...]:
        """The line as the table shows it."""
        against = str(self.against) if self.against is not None else self.against_text
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}" if self.ratios else ""
        return (self.what, str(self.measured), against, ratio, spread, str(self.bound or ""), self.verdict)

    def as_json(self) -> dict[str, Any]:
        """The line as the document holds it."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


def compare(
    what: str,
    measured: Sequence[Figure],
    against: Sequence[Figure],
    bound: Bound | None = None,
) -> Finding:
    """A finding from rounds that ran in turns: median figures, and the median of the rounds' ratios."""
    ratios = tuple(one.value / other.value for one, other in zip(measured, against, strict=True))
    return Finding(what, middle(measured), middle(against), ratios, bound)


def middle(figures: Sequence[Figure]) -> Figure:
    """The median of the same figure over the rounds."""
    return Figure(median(figure.value for figure in figures), figures[0].unit, figures[0].what)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed; no value is left out."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


HEADER = ("what", "measured", "against", "ratio", "rounds", "bound", "")


def table(findings: Sequence[Finding]) -> str:
    """Every finding in aligned columns."""
    rows = [HEADER, *(finding.cells() for finding in findings)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return "\n".join(lines)
