"""What commands print, to a terminal or to whatever reads their output: lines and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from normlab.base.units import printable


class PlainConsole(Console):
    """A console that strips control characters: names and errors may come from files that others wrote."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def write(*lines: Table | Text | str) -> None:
    """Write to standard output. If that is not a terminal, lines are never broken, however long."""
    out = console()
    for line in lines:
        out.print(line, markup=False, emoji=False, highlight=False, soft_wrap=isinstance(line, str))


def console(*, stderr: bool = False) -> Console:
    """Standard output or error: as wide as the terminal, and very wide if it is not one."""
    as_wide_as_terminal = PlainConsole(stderr=stderr)
    if as_wide_as_terminal.is_terminal:
        return as_wide_as_terminal
    return PlainConsole(stderr=stderr, width=1000)


def table(*columns: str) -> Table:
    """A plain table; a column whose name begins with > is aligned to the right and never wraps.

    What is too long for its column continues on the next line; nothing is cut off.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_number = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number or name == "run",  # an id must be copied in one piece
            overflow="fold",
        )
    return made


def fitted(header: Sequence[str], rows: Sequence[Sequence[str | Text]], spare: Sequence[str]) -> Table:
    """Build a table that fits the terminal: ``spare`` columns are dropped, in this order, until it does."""
    out = console()
    for number in range(len(spare) + 1):
        places = [place for place, name in enumerate(header) if name not in spare[:number]]
        fitting = table(*(header[place] for place in places))
        for row in rows:
            fitting.add_row(*(row[place] for place in places))
        if out.measure(fitting, options=out.options.update(width=1000)).maximum <= out.width:
            break
    return fitting
