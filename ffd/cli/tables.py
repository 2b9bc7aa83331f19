"""Tables that fit a terminal, and pages of them.

On a terminal the widest cells are cut, with `…`; where that is not enough, columns that say least are left out. An id
is cut last, and then from its front, because ids made in one second begin alike. A pipe gets everything.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ffd.cli.output import Invocation, printable

if TYPE_CHECKING:
    from ffd.core.records import Page

GAP: Final = "  "
CELL_WIDTH_MIN: Final = 6
ID_WIDTH_MIN: Final = 13


class Column(NamedTuple):
    """A column of a table: an id, or short words that are no use when cut, or text.

    Where there is no room, columns with a `spare` above 0 go, the highest first.
    """

    title: str
    is_id: bool = False
    is_whole: bool = False
    spare: int = 0


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; None when it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_width(text: str) -> int:
    """How many places a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def cut(text: str, width: int, *, keep_end: bool = False) -> str:
    """A text of at most `width` places; `…` stands for what is gone."""
    if text_width(text) <= width:
        return text
    kept = text[::-1] if keep_end else text
    while text_width(kept) > width - 1:
        kept = kept[:-1]
    return f"…{kept[::-1]}" if keep_end else f"{kept}…"


def _narrowest(column: Column, width: int) -> int:
    return width if column.is_id or column.is_whole else min(width, CELL_WIDTH_MIN)


def _line_width(widths: Iterable[int]) -> int:
    places = list(widths)
    return sum(places) + len(GAP) * (len(places) - 1)


def fit(columns: Sequence[Column], widths: Sequence[int], width: int) -> dict[int, int]:
    """The columns to show, by number, and their widths: what can be spared goes, then the widest cells are cut."""
    fitted = dict(enumerate(widths))
    spare = sorted((at for at in fitted if columns[at].spare), key=lambda at: columns[at].spare)
    while spare and _line_width(_narrowest(columns[at], places) for at, places in fitted.items()) > width:
        del fitted[spare.pop()]
    for is_id, narrowest in ((False, CELL_WIDTH_MIN), (True, ID_WIDTH_MIN)):
        cuttable = [at for at in fitted if columns[at].is_id == is_id and not columns[at].is_whole]
        while _line_width(fitted.values()) > width:
            wide = [at for at in cuttable if fitted[at] > narrowest]
            if not wide:
                break
            fitted[max(wide, key=fitted.__getitem__)] -= 1
    return fitted


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lines of a table, its titles first. Cells are other people's text and are escaped here."""
    lines = [[column.title for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(text_width(line[at]) for line in lines) for at in range(len(columns))]
    fitted = dict(enumerate(widths)) if width is None else fit(columns, widths, width)
    return [
        GAP.join(
            _pad(cut(line[at], places, keep_end=columns[at].is_id), places) for at, places in fitted.items()
        ).rstrip()
        for line in lines
    ]


def _pad(text: str, width: int) -> str:
    return text + " " * (width - text_width(text))


def facts(pairs: Sequence[tuple[str, str]], indent: str = "") -> list[str]:
    """Lines of names and values; an empty value is shown as a dash."""
    widest = max(text_width(name) for name, _ in pairs)
    return [f"{indent}{_pad(name, widest)}{GAP}{printable(value) or '-'}" for name, value in pairs]


def tell_page(
    invocation: Invocation,
    page: Page[Any],
    lines: Sequence[str],
    *,
    command: Sequence[str],
    empty: str,
) -> None:
    """Print a page, and the command for the next one if there is more."""
    import msgspec

    for line in lines if page.items else [empty]:
        invocation.say(line)
    if page.next is not None:
        config = () if invocation.config is None else ("--config", str(invocation.config))
        invocation.say(f"\nnext page: {shlex.join(['ffd', *command, *config, '--after', page.next])}")
    invocation.emit(msgspec.to_builtins(page))
