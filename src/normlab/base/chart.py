"""Charts as data: which columns of a table are shown, and as what; how they are drawn is for ``report``.

A study, an artefact of a paper and a page declare their charts with these classes, and one function draws
them all (``normlab.report.drawings.draw``). A chart is stored with the tables, as a dict of its ``kind`` and
its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normlab.base.io import from_plain, to_plain
from normlab.errors import UserError


@dataclass(frozen=True)
class Drawing:
    """A chart of one table. Each kind of chart is a subclass, in this file or in a module of a user's own."""

    fixed_columns: ClassVar[tuple[str, ...]] = ()
    """The columns that the table of every chart of this kind must have."""
    column_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that each hold the name of a column, or are empty."""
    named_after: ClassVar[str] = ""
    """Of these, the one that tells charts of one table apart; empty where a table has one chart."""

    table: str
    title: str
    caption: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """What tells it from the other charts of its page."""
        return f"{self.table}-{getattr(self, self.named_after)}" if self.named_after else self.table

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that its table must have for it to be drawn; an error names those that are missing."""
        chosen = (getattr(self, name) for name in self.column_fields)
        return (*self.fixed_columns, *filter(None, chosen))

    def to_plain(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **to_plain(self)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Drawing:
        """Rebuild a chart from what ``to_plain`` returned. Raises UserError for an unknown kind."""
        kinds = {cls.__name__: cls for cls in Drawing.__subclasses__()}
        fields = dict(plain)
        kind = fields.pop("kind", "")
        if kind not in kinds:
            raise UserError(f"there is no chart of kind {kind!r}; there are {', '.join(kinds)}")
        return from_plain(kinds[kind], fields)


# ------------------------------------------------------------------------------------ charts of any table


@dataclass(frozen=True)
class Lines(Drawing):
    """The column ``y`` against ``x``, a line per value of the column ``group``, or a single one.

    Rows with the same ``x`` and ``group`` are drawn as their mean, with a band from the lowest to the highest
    or, if the table has columns ``low`` and ``high`` around ``y``, with that interval.
    """

    column_fields = ("x", "y", "group", "panel", "theory")
    named_after = "y"

    x: str
    y: str
    x_axis: str
    y_axis: str
    group: str = ""
    """Column whose values differ by colour, such as the placement."""
    panel: str = ""
    """Column whose values each have a chart of their own, all on one scale."""
    theory: str = ""
    """Column drawn as a dashed line next to what was measured."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bars(Drawing):
    """A bar of length ``y`` for each name in the column ``x``, and beside each other for each ``group``; with
    means and intervals, ``group`` and ``panel`` as in ``Lines``.
    """

    column_fields = ("x", "y", "group", "panel")
    named_after = "y"

    x: str
    y: str
    x_axis: str
    y_axis: str
    group: str = ""
    panel: str = ""
    log_y: bool = False


@dataclass(frozen=True)
class Cells(Drawing):
    """A heat map: the column ``value`` as the shade of a cell for each pair of ``x`` and ``y``; ``panel`` as
    in ``Lines``.
    """

    column_fields = ("x", "y", "value", "panel")
    named_after = "value"

    x: str
    y: str
    value: str
    x_axis: str
    y_axis: str
    panel: str = ""


@dataclass(frozen=True)
class Strips(Drawing):
    """A tick per row and quantity, one strip per ``category`` and quantity. ``quantities`` maps the name of a
    quantity to its column, ``label`` is the column that names a tick, and ``order`` lists the categories.
    Rows whose label ends with ``without`` are left out.
    """

    category: str
    label: str
    quantities: dict[str, str]
    axis: str
    order: tuple[str, ...] = ()
    without: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.category, self.label, *self.quantities.values())


# --------------------------------------------- charts of tables whose rows belong to sublayers of a model


@dataclass(frozen=True)
class ByDepth(Drawing):
    """The column ``y`` of a table with ``stack`` and ``index``, at every sublayer: one chart per stack, with
    a common vertical axis and a point per row, coloured by the role of its sublayer.

    ``where`` selects rows by their values. ``theory`` and ``bounds`` name columns with an expected value and
    with its lower and upper bound. ``by_role`` draws one line per role instead of one for the stack.
    ``sum_squares`` combines the rows of a sublayer into the root of the sum of their squares.
    """

    fixed_columns = ("stack", "index")
    column_fields = ("y",)
    named_after = "y"

    y: str
    axis: str
    log: bool = False
    where: dict[str, str] = field(default_factory=dict)
    theory: str = ""
    bounds: tuple[str, ...] = ()
    by_role: bool = False
    sum_squares: bool = False


@dataclass(frozen=True)
class BySteps(Drawing):
    """The column ``value`` over ``step``, in a table with ``stack``, ``module`` and ``index``: one chart per
    stack, and a line per module, shaded by its index.
    """

    fixed_columns = ("stack", "index", "module", "step", "value")

    axis: str
    log: bool = True


@dataclass(frozen=True)
class HeatMap(Drawing):
    """A share between 0 and 1, ``value``, for each pair of a sublayer ``y`` and a branch ``x`` (-1: the
    stack's input), in a table with ``stack``: one chart per stack. It replaces its table, which the page does
    not repeat.
    """

    fixed_columns = ("stack",)
    column_fields = ("x", "y", "value")

    x: str
    y: str
    value: str
    x_axis: str
    y_axis: str


@dataclass(frozen=True)
class Growth(Drawing):
    """The column ``change`` against ``depth`` on logarithmic axes, one chart per stack, with the laws of the
    table ``fits``. ``words`` describes each ``kind`` of change.
    """

    fixed_columns = ("stack", "kind", "depth", "change", "seed")

    fits: str
    words: dict[str, str]
