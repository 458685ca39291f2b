"""Charts as data: a study says how to draw its table, and a page draws it without knowing the study.

A chart is stored with the tables, as a dict with its ``kind`` and its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.base.io import from_plain, to_plain
from normlab.errors import UserError


@dataclass(frozen=True)
class StudyChart:
    """A chart of one table. Each kind of chart is a subclass."""

    table: str
    title: str
    caption: str = field(default="", kw_only=True)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **to_plain(self)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> StudyChart:
        """Rebuild a chart from what ``to_plain`` returned. Raises UserError for an unknown kind."""
        kinds = {cls.__name__: cls for cls in StudyChart.__subclasses__()}
        fields = dict(plain)
        kind = fields.pop("kind", "")
        if kind not in kinds:
            raise UserError(f"there is no chart of kind {kind!r}; there are {', '.join(kinds)}")
        return from_plain(kinds[kind], fields)


@dataclass(frozen=True)
class ByDepth(StudyChart):
    """The column ``y`` of a table with ``stack`` and ``index``, at every sublayer: one chart per stack, with
    a common vertical axis and a point per row, coloured by the role of its sublayer.

    ``where`` selects rows by their values. ``theory`` and ``bounds`` name columns with an expected value and
    with its lower and upper bound. ``by_role`` draws one line per role instead of one for the stack.
    ``sum_squares`` combines the rows of a sublayer into the root of the sum of their squares.
    """

    y: str
    axis: str
    log: bool = False
    where: dict[str, str] = field(default_factory=dict)
    theory: str = ""
    bounds: tuple[str, ...] = ()
    by_role: bool = False
    sum_squares: bool = False


@dataclass(frozen=True)
class HeatMap(StudyChart):
    """A share between 0 and 1, ``value``, for each pair of a sublayer ``y`` and a branch ``x`` (-1: the
    stack's input): one chart per stack. It replaces its table, which the page does not repeat.
    """

    x: str
    y: str
    value: str
    x_axis: str
    y_axis: str


@dataclass(frozen=True)
class Growth(StudyChart):
    """The column ``change`` against ``depth`` on logarithmic axes, one chart per stack, with the laws of the
    table ``fits``. ``words`` describes each ``kind`` of change.
    """

    fits: str
    words: dict[str, str]


@dataclass(frozen=True)
class Strips(StudyChart):
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


@dataclass(frozen=True)
class Lines(StudyChart):
    """The column ``y`` against ``x``, a line per value of the column ``group``, or a single one."""

    x: str
    y: str
    x_axis: str
    y_axis: str
    group: str = ""
    log: bool = False
