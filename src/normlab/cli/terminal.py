"""Plain tables and lines in a terminal, or in what reads a command's output."""

from __future__ import annotations

from collections.abc import Iterable

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


def console() -> Console:
    """Standard output: as wide as a terminal is, and very wide where it is none."""
    found = PlainConsole()
    return found if found.is_terminal else PlainConsole(width=1000)


def table(*columns: str) -> Table:
    """A plain table; a column whose name begins with > is aligned to the right and never wraps.

    What is too long for its column goes on in the next line; nothing is cut off.
    """
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
