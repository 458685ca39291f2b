"""Charts of judgements: the score of every run, and how a sequential comparison went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from normlab.report.charts.drawing import Drawn, finish, frame, layer, level

HEIGHT: Final = 280
HEIGHT_OF_CHANGE: Final = 36
"""The height of the row of each change, in px."""
LABEL_WIDTH: Final = 170
"""The width of the names of changes, in px: on a phone, half of the chart."""


def scores_by_change(rows: Sequence[Mapping[str, Any]], changes: Sequence[str], metric: str) -> Drawn:
    """Draw a row for each change, with a point for the score of each run, and a line through the runs of each
    seed.

    ``rows`` have ``change``, ``seed`` and a column called ``metric``. Names may be long, as those of
    commands are: beside rows there is room for them, and below columns there is none.
    """
    label_of = dict(zip(changes, labels(changes), strict=True))
    points = frame(
        [
            {
                "change": row["change"],
                "label": label_of[row["change"]],
                "place": changes.index(row["change"]),
                "seed": row["seed"],
                "score": row[metric],
            }
            for row in rows
        ]
    )
    axis = alt.Axis(labelLimit=LABEL_WIDTH, grid=False)
    y = alt.Y("label:N", sort=list(label_of.values()), title=None, axis=axis)
    x = alt.X("score:Q", title=metric, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    tooltip = ["change:N", "seed:N", alt.Tooltip("score:Q", format=".6~g")]
    thin = {"style": "faint", "strokeWidth": 1, "opacity": 0.5}
    lines = layer(points, "line", thin, x=x, y=y, detail="seed:N", order="place:Q")
    dots = layer(points, "point", {"filled": True, "size": 50, "style": "ink"}, x=x, y=y, tooltip=tooltip)
    return finish([*lines, *dots], 60 + HEIGHT_OF_CHANGE * len(changes))


def labels(changes: Sequence[str]) -> list[str]:
    """Return names with ``…`` in place of the words that all of them begin with, except for the last such
    word: commands often differ only at their end.

    >>> labels(["python train.py --lr=1", "python train.py --lr=1 --decay=0"])
    ['… --lr=1', '… --lr=1 --decay=0']
    """
    names = [change.split(" ") for change in changes]
    shared = 0
    for words in zip(*names, strict=False):
        if len(set(words)) > 1:
            break
        shared += 1
    if shared < 2 or len(names) < 2:
        return list(changes)
    return [" ".join(["…", *words[shared - 1 :]]) for words in names]


def gains_by_seed(rows: Sequence[Mapping[str, Any]]) -> Drawn:
    """Draw the ``gain`` of each ``seed``, and the ``mean so far`` as a line."""
    points = frame(
        [{"seed": str(row["seed"]), "gain": row["gain"], "mean": row["mean so far"]} for row in rows]
    )
    x = alt.X("seed:N", sort=None, title="seed", axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("gain:Q", title="gain", axis=alt.Axis(tickCount=5))
    tooltip = ["seed:N", *(alt.Tooltip(f"{name}:Q", format="+.4~g") for name in ("gain", "mean"))]
    zero = level(0.0, "no gain", alt.Y("level:Q"))
    line = layer(points, "line", {"style": "faint"}, x=x, y=alt.Y("mean:Q", title="gain"))
    dots = layer(points, "point", {"filled": True, "size": 60, "style": "ink"}, x=x, y=y, tooltip=tooltip)
    return finish([*zero, *line, *dots] if rows else [], HEIGHT)
