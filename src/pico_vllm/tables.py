"""Tables in which names give way to the width there is; numbers and headings are whole at any width.

Tables of profiles and of benchmarks are printed here; nothing here knows what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

UNKNOWN = "–"
_NAMES = ("", "op")
_MIN_NAME, _MAX_NAME = 18, 60  # at 18 the table of ops fits into 80 columns
_UNLIMITED = 10_000


class NumberTable:
    """A table of names and numbers; a column in which nothing is known is left out.

    Args:
        title: above it.
        header: the first, "", and "op" are names, to the left.
        rows: cells as they are printed, ``UNKNOWN`` for what isn't known.
    """

    def __init__(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        columns = [(heading, [row[i] for row in rows]) for i, heading in enumerate(header)]
        self._title = title
        self._columns = [(heading, cells) for heading, cells in columns if set(cells) != {UNKNOWN}]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [_column(heading, cells) for heading, cells in self._columns]
        table = Table(*columns, title=self._title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in zip(*(cells for _, cells in self._columns), strict=True):
            table.add_row(*(Text(cell) for cell in row))
        excess = _width(console, options, table) - options.max_width
        names = [column for column in columns if column.header in _NAMES]
        while excess > 0:
            longest = max(names, key=lambda column: column.width or 0)
            if longest.width is None or longest.width <= _MIN_NAME:
                break  # the terminal wraps the lines
            longest.width -= 1
            excess -= 1
        table.width = _width(console, options, table)
        yield table


def print_tables(what: RenderableType, *, min_width: int = 0) -> None:
    """To the terminal in its width, to a pipe or a file in full.

    Args:
        what: to print.
        min_width: of tables that would cut numbers off in less; a narrower terminal wraps their lines.
    """
    console = Console()
    console = Console(width=max(console.width, min_width) if console.is_terminal else _UNLIMITED)
    console.print(what, highlight=False, crop=False)


# ---------------------------------------------------------------------------------------------------------- private
def _column(heading: str, cells: Sequence[str]) -> Column:
    """As wide as what is in it; names up to a limit."""
    is_name = heading in _NAMES
    width = max(cell_len(text) for text in (heading, *cells))
    return Column(
        heading,
        justify="left" if is_name else "right",
        width=min(width, _MAX_NAME) if is_name else width,
        no_wrap=True,
        overflow="ellipsis",
    )


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    """Of the whole table."""
    return Measurement.get(console, options.update(width=_UNLIMITED), table).maximum
