"""Pages: a headline and blocks, which ``Page.html`` renders as one file that needs no network.

The file contains Vega, Vega-Lite and the charts' data, follows the reader's light or dark mode, and has a
content security policy that forbids every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

import altair as alt
import jinja2
import polars as pl
from markupsafe import Markup, escape

from normlab.base.files import write_output
from normlab.errors import UserError
from normlab.report.charts.theme import MANY, POINTS, Drawn, colour, dash, theme

LIMIT_BYTES: Final = 5_000_000
"""No page is larger."""

SHORTER: Final = ((POINTS, False), (200, False), (100, False), (100, True), (50, True), (25, True))
"""Forms of a page, from which the first that is small enough is used: how many points a line may have, and
whether parts that are also in files beside the page are left out.
"""


@dataclass(frozen=True)
class Text:
    """A paragraph. A plain string is escaped, ``Markup`` is not. ``tone``: "", "note" or "alarm"."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Notes:
    """A list of notes, one sentence per line."""

    notes: Sequence[Text]


@dataclass(frozen=True)
class Html:
    """Markup that no other block can hold; its content must already be escaped."""

    markup: Markup


@dataclass(frozen=True)
class Code:
    """A command or a text, with a button that copies it."""

    text: str


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, a smaller line below it, its link and its tone."""

    text: str
    small: str = ""
    href: str = ""
    tone: str = ""
    """"", "best", "good", "bad", "faint" or "alarm"."""
    title: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table; it scrolls inside its own box. The first column holds the rows' headings."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    text_columns: int = 1
    """How many columns, from the left, hold words; the others are aligned to the right, as numbers."""


@dataclass(frozen=True)
class Chart:
    """A chart with its title and caption; ``table`` is written to the CSV file ``name``.

    ``chart`` may be a function that draws it with at most a given number of points per line.
    """

    name: str
    title: str
    caption: str
    chart: Drawn | Callable[[int], Drawn]
    table: pl.DataFrame


@dataclass(frozen=True)
class Columns:
    """Blocks side by side if there is room for ``wide`` px each, otherwise (on a phone) below each other."""

    blocks: Sequence[Block]
    wide: int = 440


@dataclass(frozen=True)
class Details:
    """Blocks that are shown on request; a link to ``anchor`` opens them."""

    summary: str
    blocks: Sequence[Block]
    anchor: str = ""
    beside: str = ""
    """The file, if any, that holds the same; a page that would be too large refers to it instead."""
    open: bool = False
    """Whether they are shown from the start."""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    anchor: str
    intro: str = ""
    listed: bool = True
    """Whether the page's line of contents names it."""


Block = Text | Notes | Html | Code | PageTable | Chart | Columns | Details | Section


@dataclass(frozen=True)
class Page:
    """A headline, the facts in one line, one sentence (``lead``), then the blocks."""

    title: str
    headline: str
    facts: Sequence[str]
    lead: str
    blocks: Sequence[Block]
    recipes: Sequence[str] = ()
    """The recipes in the order of their colours, and of the legend that all charts share."""
    legend: Literal["Recipes", "Setups", "Sizes", "Roles"] = "Recipes"
    """What the legend names: recipes, setups or sizes, drawn as lines, or roles of sublayers, as points."""

    def charts(self) -> list[Chart]:
        return list(charts_in(self.blocks))

    def html(self) -> str:
        """Return the page as one HTML document, in the first of the forms ``SHORTER`` that is small enough.

        Raises:
            ValueError: two charts have the same name.
            UserError: the page is larger than ``LIMIT_BYTES`` in every form.
        """
        charts = self.charts()
        names = [chart.name for chart in charts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"charts need names of their own, but these occur twice: {', '.join(twice)}; rename one"
            )
        size = 0
        for points, short in SHORTER:
            text = self._drawn(points, _short(self.blocks) if short else self.blocks)
            if (size := len(text.encode())) <= LIMIT_BYTES:
                return text
        raise UserError(
            f"the page has {size:,} bytes in its shortest form, but at most {LIMIT_BYTES:,} are allowed; "
            "show fewer runs on it"
        )

    def write(self, path: Path) -> Path:
        """Write the page to a path that a person named, make its folders if necessary; return the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, self.html())
        return path

    def _drawn(self, points: int, blocks: Sequence[Block]) -> str:
        charts = {c.name: c.chart(points) if callable(c.chart) else c.chart for c in self.charts()}
        # the parts of a chart are validated when they are made, and the tests validate whole charts
        drawn = {name: chart.to_dict(validate=False) for name, chart in charts.items()}
        specs = {name: {k: v for k, v in spec.items() if k != "config"} for name, spec in drawn.items()}
        return _template().render(
            page=self,
            blocks=blocks,
            many=MANY,
            toc=[b for b in self.blocks if isinstance(b, Section) and b.listed],
            swatches=[(_dot if self.legend == "Roles" else swatch)(i) for i in range(len(self.recipes))],
            palette=[(colour(i), colour(i, "dark")) for i in range(len(self.recipes))],
            vega=_vega() if charts else "",
            specs=_json(specs),
            configs=_json({mode: theme(mode, legend=False) for mode in ("light", "dark")}),
        )


def swatch(index: int) -> Markup:
    """Return a sample of the recipe's line, in its colour and dash."""
    stroke = 'stroke="var(--recipe-{})" stroke-width="3" stroke-dasharray="{}"'
    line = Markup(f'<line x1="0" y1="4" x2="22" y2="4" {stroke}/>')
    return _SAMPLE.format(line.format(index, " ".join(map(str, dash(index)))))


def _dot(index: int) -> Markup:
    return _SAMPLE.format(Markup('<circle cx="11" cy="4" r="4" fill="var(--recipe-{})"/>').format(index))


_SAMPLE: Final = Markup('<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{}</svg>')


def _short(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, but leave out what a file beside the page holds as well."""
    short: list[Block] = []
    for block in blocks:
        if isinstance(block, Details) and block.beside:
            where = Text(f"Left out because the page would be too large; see {block.beside}.", "note")
            block = replace(block, blocks=[where])
        elif isinstance(block, Columns | Details | Section):
            block = replace(block, blocks=_short(block.blocks))
        short.append(block)
    return short


def charts_in(blocks: Iterable[Block]) -> Iterator[Chart]:
    """Yield the charts in these blocks, in their order."""
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Columns | Details | Section):
            yield from charts_in(block.blocks)


def _json(value: object) -> Markup:
    """Return JSON that cannot end its own script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@cache
def _vega() -> Markup:
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return Markup(bundle.replace("</script", "<\\/script"))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("normlab.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["kind"] = lambda block, name: type(block).__name__ == name
    return environment.get_template("page.html.j2")


def capital(sentence: str) -> str:
    """Begin a sentence with a capital letter, unless its first word is the path of a module."""
    first = sentence.partition(" ")[0].strip(":,;")
    return sentence if "." in first or "_" in first else sentence[:1].upper() + sentence[1:]


def whole(sentence: str) -> Markup:
    """Return a sentence in which rates such as 3e-4 are not broken at their hyphens."""
    return Markup(re.sub(r"\S*\de-\d\S*", r'<span class="whole">\g<0></span>', str(escape(sentence))))


def breakable(name: str) -> Markup:
    """Return a name with permitted line breaks after its ``.``, ``_``, ``+``, ``/`` and ``:``."""
    return Markup("<wbr>").join(re.split(r"(?<=[._+/:])", name))


def anchor(text: str) -> str:
    """Return a name for charts and links, unique to the text: ``pre+fixnorm`` -> ``pre-2b-fixnorm``."""
    return "".join(c if c.isalnum() and c.isascii() else f"-{ord(c):x}-" for c in text)


def labelled(chart: Chart, label: str) -> Chart:
    """Return a chart whose name and title say which part of the data it shows; with "", the same chart."""
    if not label:
        return chart
    return replace(chart, name=f"{chart.name}-{anchor(label)}", title=f"{chart.title}, {label}")
