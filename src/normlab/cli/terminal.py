"""Plain tables and lines in a terminal, or in what reads a command's output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from normlab.config.units import printable


class PlainConsole(Console):
    """A console whose text has no control characters: names and errors come from files that others wrote."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a renderable, as ``Console`` does."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def write(*things: Table | Text | str) -> None:
    """To standard output; what is not a terminal gets whole lines, however long."""
    out = console()
    for thing in things:
        out.print(thing, markup=False, emoji=False, highlight=False, soft_wrap=isinstance(thing, str))


def console(*, stderr: bool = False) -> Console:
    """Standard output or error: as wide as a terminal is, and very wide where it is none."""
    plain = PlainConsole(stderr=stderr)
    return plain if plain.is_terminal else PlainConsole(stderr=stderr, width=1000)


def table(*columns: str) -> Table:
    """A plain table; a column whose name begins with > is aligned to the right, and nothing is cut off."""
    plain = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        number = name.startswith(">")
        plain.add_column(
            name.removeprefix(">"),
            justify="right" if number else "left",
            no_wrap=number or name == "run",
            overflow="fold",
        )
    return plain


def fitted(header: Sequence[str], rows: Sequence[Sequence[str | Text]], spare: Sequence[str]) -> Table:
    """Build a table that fits the terminal; ``spare`` columns are dropped first, in this order."""
    out = console()
    for dropped in range(len(spare) + 1):
        kept = [i for i, name in enumerate(header) if name not in spare[:dropped]]
        fitting = table(*(header[i] for i in kept))
        for row in rows:
            fitting.add_row(*(row[i] for i in kept))
        if out.measure(fitting, options=out.options.update(width=1000)).maximum <= out.width:
            break
    return fitting
