"""Pages: a headline and blocks, which ``Page.html`` renders as one file that needs no network.

The file contains Vega, Vega-Lite and the charts' data, follows the reader's light or dark mode, and has a
content security policy that forbids every request.

Charts are drawn with altair, polars and vl-convert, which are optional: this module imports them when it
draws. Where they are not installed, a page has a table in the place of each chart, and says what to install.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import jinja2
from markupsafe import Markup, escape

from normlab.base.files import write_output
from normlab.base.io import NOT_FINITE
from normlab.base.units import count
from normlab.errors import UserError
from normlab.report.charts import INSTALL, installed
from normlab.report.charts.theme import MANY, POINTS, colour, dash, theme

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

LIMIT_BYTES: Final = 5_000_000
"""No page is larger."""


class Form(NamedTuple):
    """How detailed a page is: what is thinned or left out so that its file is not too large."""

    most: int
    """How many points a line of a chart may have or, where no charts can be drawn, how many rows the table in
    its place may have."""
    is_short: bool = False
    """Whether parts that are also in files beside the page (``Details.beside``) are left out."""


FORMS: Final = (
    Form(POINTS),
    Form(200),
    Form(100),
    Form(100, is_short=True),
    Form(50, is_short=True),
    Form(25, is_short=True),
)
"""The forms of a page, the most detailed first; the first whose file is small enough is used."""

MOST_CELLS: Final = 12_000
"""The most cells that a table in the place of a chart has."""

Row = Mapping[str, Any]
"""A row of a table by the names of its columns, the same in every row."""


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
    """A chart with its title and caption."""

    name: str
    title: str
    caption: str
    draw: Callable[[int], Drawn]
    """Draws it; called only where charts can be drawn.

    It is given the number of points that a line may have (``Form.most``). That is for charts whose lines may
    have thousands of points, such as training curves: they make a page large, and thinning them makes it
    smaller. A chart ignores it if it has few points, such as one for each rate or change, or if it thins its
    lines to a number of its own."""
    rows: Sequence[Row] = ()
    """The numbers that it shows, in columns named as a reader knows them: a table of them stands in its place
    where no chart can be drawn."""
    marks: str = ""
    """What its lines, dots and crosses mean: the end of the caption of a chart that is drawn."""
    csv: Callable[[], str] | None = None
    """What writes all its numbers for a file beside the page, if there is such a file."""

    def drawn(self, points: int = POINTS) -> Drawn:
        """Draw the chart, in full detail unless a smaller number of points per line is given."""
        return self.draw(points)


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
    marks: str = ""
    """What the lines of all its charts mean: the end of the intro where they are drawn."""
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
    series: Sequence[str] = ()
    """The names of what has a colour of its own in the charts (``charts.theme.SERIES``), in the order of the
    colours and of the legend that all charts share."""
    legend: Literal["Recipes", "Setups", "Sizes", "Roles"] = "Recipes"
    """What the series are, for the legend: roles of sublayers are drawn as points, all others as lines."""

    def charts(self) -> list[Chart]:
        return list(charts_in(self.blocks))

    def html(self) -> str:
        """Return the page as one HTML document, in the first of ``FORMS`` that is small enough.

        Raises:
            ValueError: two charts have the same name.
            UserError: the page is larger than ``LIMIT_BYTES`` in every form.
        """
        names = [chart.name for chart in self.charts()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"charts need names of their own, but these occur twice: {', '.join(twice)}; rename one"
            )
        render = self._with_charts if installed() or not names else self._without_charts
        size = 0
        for form in FORMS:
            text = render(form.most, _short(self.blocks) if form.is_short else self.blocks)
            size = len(text.encode())
            if size <= LIMIT_BYTES:
                return text
        raise UserError(
            f"the page has {size:,} bytes in its shortest form, but at most {LIMIT_BYTES:,} are allowed; "
            "show less on it, such as fewer runs"
        )

    def write(self, path: Path) -> Path:
        """Write the page to a path that a person named, make its folders if necessary; return the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, self.html())
        return path

    def _with_charts(self, points: int, blocks: Sequence[Block]) -> str:
        specs = {}
        for chart in self.charts():
            # the parts of a chart are validated when they are made, and the tests validate whole charts
            spec = chart.drawn(points).to_dict(validate=False)
            spec.pop("config", None)  # the page has one for each mode
            specs[chart.name] = spec
        return self._rendered(blocks, specs, self.series)

    def _without_charts(self, rows: int, blocks: Sequence[Block]) -> str:
        """Render the page with tables of at most so many rows in place of its charts.

        It has no legend, which explains lines and points that are not there.
        """
        return self._rendered([WITHOUT_CHARTS, *_tabulated(blocks, rows)], {}, ())

    def _rendered(self, blocks: Sequence[Block], specs: Mapping[str, Any], legend: Sequence[str]) -> str:
        sample = _dot if self.legend == "Roles" else swatch
        places = range(len(self.series))
        return _template().render(
            page=self,
            blocks=blocks,
            legend=legend,
            many=MANY,
            toc=[block for block in self.blocks if isinstance(block, Section) and block.listed],
            swatches=[sample(i) for i in places],
            palette=[(colour(i), colour(i, "dark")) for i in places],
            vega=_vega() if specs else "",
            specs=_json(specs),
            configs=_json({mode: theme(mode, legend=False) for mode in ("light", "dark")}),
        )


WITHOUT_CHARTS: Final = Text(
    Markup(
        "The charts of this page are tables here. To see them drawn, run <code>{}</code> and write the page "
        "again."
    ).format(INSTALL),
    "note",
)


def swatch(index: int) -> Markup:
    """Return a sample of the line of the series at ``index``, in its colour and dash."""
    stroke = 'stroke="var(--recipe-{})" stroke-width="3" stroke-dasharray="{}"'
    line = Markup(f'<line x1="0" y1="4" x2="22" y2="4" {stroke}/>')
    return _SAMPLE.format(line.format(index, " ".join(map(str, dash(index)))))


def _dot(index: int) -> Markup:
    """Return a sample of the points of the series at ``index``, in their colour."""
    return _SAMPLE.format(Markup('<circle cx="11" cy="4" r="4" fill="var(--recipe-{})"/>').format(index))


_SAMPLE: Final = Markup('<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{}</svg>')


def _short(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, but leave out what a file beside the page holds as well."""
    short: list[Block] = []
    for block in blocks:
        if isinstance(block, Details) and block.beside:
            reference = Text(f"Left out because the page would be too large; see {block.beside}.", "note")
            block = replace(block, blocks=[reference])
        elif isinstance(block, Columns | Details | Section):
            block = replace(block, blocks=_short(block.blocks))
        short.append(block)
    return short


def _tabulated(blocks: Iterable[Block], rows: int) -> list[Block]:
    """Return the blocks with a table of at most so many rows in the place of each chart."""
    tabulated: list[Block] = []
    for block in blocks:
        if isinstance(block, Chart):
            tabulated.append(_table_of_chart(block, rows))
        elif isinstance(block, Columns):
            # a table that is opened needs the whole width
            tabulated += _tabulated(block.blocks, rows)
        elif isinstance(block, Section):
            tabulated.append(replace(block, blocks=_tabulated(block.blocks, rows), marks=""))
        elif isinstance(block, Details):
            tabulated.append(replace(block, blocks=_tabulated(block.blocks, rows)))
        else:
            tabulated.append(block)
    return tabulated


def _table_of_chart(chart: Chart, most: int) -> Details:
    """Return the rows of a chart as a table that is shown on request; links to the chart open it."""
    blocks: list[Block] = [Text(chart.caption, "note")] if chart.caption else []
    if chart.rows:
        most = min(most, MOST_CELLS // len(chart.rows[0]))
        rows = _spaced(chart.rows, max(2, most))
        if len(rows) < len(chart.rows):
            blocks.append(Text(f"{len(rows)} of {len(chart.rows):,} rows, evenly spaced.", "note"))
        blocks.append(table_of(rows))
    else:
        blocks.append(Text("No finite value.", "note"))
    number = count(len(chart.rows), "row")
    summary = Markup("{} <span class=note>{}</span>").format(chart.title, number)
    return Details(summary, blocks, f"figure-{chart.name}")


def _spaced(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """Return at most so many rows, 2 or more, from the first to the last, as evenly spaced as can be."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def table_of(rows: Sequence[Row], most: int | None = None) -> PageTable:
    """Return the first ``most`` rows, or all, as a table with columns of words to the left of numbers."""
    words: list[str] = []
    numbers: list[str] = []
    for column in rows[0]:
        texts = [row[column] for row in rows if isinstance(row[column], str)]
        if all(text in NOT_FINITE for text in texts):
            numbers.append(column)
        else:
            words.append(column)
    columns = [*words, *numbers]
    body = [[Cell(number_cell(row[column])) for column in columns] for row in rows[:most]]
    return PageTable(columns, body, text_columns=len(words))


def number_cell(value: Any) -> str:
    """A value in words; numbers have four digits."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    import altair as alt
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
    first_word = sentence.partition(" ")[0].strip(":,;")
    if "." in first_word or "_" in first_word:
        return sentence
    return sentence[:1].upper() + sentence[1:]


def with_whole_rates(sentence: str) -> Markup:
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
