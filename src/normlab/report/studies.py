"""The charts of a diagnosis: its tables as frames, by stack, with the roles of sublayers in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import polars as pl

from normlab.figures.diagnosis import by_depth, by_kind, growth, heat_map
from normlab.report.page import Chart, Grid, Section
from normlab.report.words import slug
from normlab.spec.serialise import NOT_FINITE

ROLES: Final = {
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "ffn": "feed-forward",
    "branch": "branch",
}
KINDS: Final = ("query", "key", "value", "output", "ffn_in", "ffn_out", "norm", "embedding", "other")
CHANGED: Final = {
    "random": "a random change of the sublayers' matrices",
    "update": "one step of the optimiser",
}
DRAWN: Final = ("sublayer", "layer", "recipe", "theory", "theory_low", "theory_high")
"""Columns of a chart by depth; Vega takes a column named signal for one of its own."""

Row = Mapping[str, Any]


class View:
    """The tables as frames, with the role and the number of each sublayer in words."""

    def __init__(self, diagnosis: Mapping[str, Any]) -> None:
        self.tables: Mapping[str, Sequence[Row]] = diagnosis["tables"]
        self.stacks: Mapping[str, str] = diagnosis["stacks"]

    @cached_property
    def sublayers(self) -> dict[tuple[str, int], Row]:
        return {(row["stack"], row["index"]): row for row in self.tables.get("structure", ())}

    @cached_property
    def roles(self) -> list[str]:
        """Roles that occur, in words."""
        found = {row["role"] for row in self.sublayers.values()}
        return [words for role, words in ROLES.items() if role in found]

    def of(self, table: str, stack: str, **equal: Any) -> list[Row]:
        """A table's rows of a stack, with ``sublayer``, ``layer`` and ``recipe`` (the role) added."""
        wanted = {"stack": stack, **equal}
        rows = [r for r in self.tables.get(table, ()) if all(r.get(k) == v for k, v in wanted.items())]
        return [{**row, **self._where(row)} for row in rows]

    def _where(self, row: Row) -> dict[str, Any]:
        index = row.get("index")
        known = self.sublayers.get((row["stack"], -1 if index is None else index))
        if known is None:
            return {"sublayer": None if index is None else index + 1, "layer": None, "recipe": "the input"}
        words = ROLES.get(known["role"], known["role"])
        return {"sublayer": known["index"] + 1, "layer": known["layer"] + 1, "recipe": words}


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Rows as a frame. A column of numbers, and of words for numbers that are not finite, holds floats."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return pl.DataFrame({name: _numbers(values) for name, values in columns.items()}, strict=False)


def _numbers(values: list[Any]) -> pl.Series:
    words = [v for v in values if isinstance(v, str)]
    if all(v in NOT_FINITE for v in words) and not all(v is None for v in values):
        whole = all(v is None or isinstance(v, int) for v in values)
        return pl.Series([None if v is None else (v if whole else float(v)) for v in values], strict=False)
    return pl.Series(values, dtype=pl.Float64 if not words else pl.String, strict=False)


def pictures(view: View) -> Iterator[Section]:
    """A section a quantity, for those that were measured."""
    sections = (
        ("scales", "Hidden scale", SCALE, _scales(view)),
        ("gradients", "Gradients", GRADIENTS, [*_gradients(view), *_parameters(view)]),
        ("dependency", "Dependency", DEPENDENCY, _dependency(view)),
        ("change", "Output change", CHANGE, _changes(view)),
        ("updates", "Updates", UPDATES, _updates(view)),
        ("attention", "Attention", ATTENTION, _attention(view)),
        ("similarity", "Similarity", SIMILARITY, _similarity(view)),
    )
    for anchor, title, intro, charts in sections:
        if charts:
            yield Section(title, [Grid(charts)], anchor, intro)


SCALE: Final = (
    "Mean square of stream plus branch at each sublayer, which in a Post-LN is what the norm is given, log "
    "scale. Dashed line or bar: what theory says at a Xavier start (Xiong et al. 2020, Lemma 2), where it "
    "says anything."
)
GRADIENTS: Final = (
    "Of outputs: of the loss in the output of each sublayer, relative to the largest of the model (Liu et "
    "al. 2020, Figure 3). Of parameters: L2 norm of the gradients of each sublayer's parameters, the mean "
    "over mini-batches (Xiong et al. 2020, Figure 3). Log scales."
)
DEPENDENCY: Final = (
    "How much of the variance of each sublayer's output comes from which branch (Liu et al. 2020, Section "
    "4.1, Figures 7 and 8). A dark diagonal: sublayers lean on their own branches. Even rows: on all "
    "branches before."
)
CHANGE: Final = (
    "How far the output of the first N sublayers moves when the matrices of all sublayers do, in mean "
    "square. Solid: the power law that fits best; dashed: a line in N; dotted: log N. Theory expects N of a "
    "Post-LN and log N of a Pre-LN (Liu et al. 2020, Theorem 2)."
)
UPDATES: Final = (
    "A tick a matrix or gain, relative to the model's largest: gradients may differ where one step of the "
    "optimiser moves all alike (Liu et al. 2020, Figure 5)."
)
ATTENTION: Final = "Entropy of each head's attention, in nats. Dashed: uniform attention. Zero: a single key."
SIMILARITY: Final = (
    "Mean cosine of two tokens' states, and how many directions a sequence's states use (effective rank)."
)


def _stacked(
    view: View,
    table: str,
    column: str,
    words: tuple[str, str],
    *,
    log: bool = False,
    apart: bool = False,
    **equal: Any,
) -> list[Chart]:
    """A chart a stack, all with one vertical axis; ``words`` are the title and the axis's."""
    title, axis = words
    frames = {
        label: found.select(c for c in (*DRAWN, column) if c in found.columns)
        for stack, label in view.stacks.items()
        if len(found := frame(view.of(table, stack, **equal)))
    }
    values = [v for one in frames.values() for v in _drawable(one[column], log=log)]
    if not values:
        return []
    low, high = min(values), max(values)
    pad = (low / 1.4, high * 1.4) if log else (min(0.0, low), high + 0.05 * (high - min(0.0, low) or 1.0))
    return [
        Chart(
            f"{table}-{column}-{anchor(label)}",
            f"{title}, {label}",
            "",
            by_depth(one, column, axis, view.roles, log=log, apart=apart, domain=pad),
            one,
        )
        for label, one in frames.items()
    ]


def _drawable(column: pl.Series, *, log: bool) -> list[float]:
    values = [float(v) for v in column.drop_nulls() if isinstance(v, (int, float))]
    return [v for v in values if math.isfinite(v) and (v > 0 or not log)]


def _scales(view: View) -> list[Chart]:
    return _stacked(view, "scales", "mean_square", ("Hidden scale", "mean square"), log=True, signal="total")


def _gradients(view: View) -> list[Chart]:
    return _stacked(
        view, "sublayer_gradients", "relative", ("Gradients of outputs", "relative gradient"), log=True
    )


def _parameters(view: View) -> list[Chart]:
    """The parameters of a sublayer taken together: gains and biases with their matrices."""
    summed: dict[tuple[str, int], float] = {}
    for row in view.tables.get("parameter_gradients", ()):
        if row["stack"] is not None and row["index"] is not None and isinstance(row["grad_l2"], float):
            place = row["stack"], row["index"]
            summed[place] = summed.get(place, 0.0) + row["grad_l2"] ** 2
    rows = [{"stack": s, "index": i, "grad_l2": square**0.5} for (s, i), square in summed.items()]
    together = View({"tables": {**view.tables, "parameters": rows}, "stacks": view.stacks})
    return _stacked(together, "parameters", "grad_l2", ("Gradients of parameters", "L2 norm"), log=True)


def _dependency(view: View) -> list[Chart]:
    rows = view.tables.get("dependency", ())
    return [
        Chart(
            f"dependency-{anchor(label)}",
            f"Where outputs come from, {label}",
            "Light: nothing. Dark: all.",
            heat_map(own),
            own,
        )
        for stack, label in view.stacks.items()
        if len(own := frame([row for row in rows if row["stack"] == stack]))
    ]


def _changes(view: View) -> list[Chart]:
    charts: list[Chart] = []
    for stack, label in view.stacks.items():
        rows = [row for row in view.tables.get("output_change", ()) if row["stack"] == stack]
        if not rows:
            continue
        points = frame([{**row, "recipe": CHANGED.get(row["kind"], row["kind"])} for row in rows])
        fits = [row for row in view.tables.get("output_change_fit", ()) if row["stack"] == stack]
        lines = [point for fit in fits for point in _line(fit, rows)]
        schema = {"recipe": pl.String, "law": pl.String, "depth": pl.Int64, "value": pl.Float64}
        drawn = growth(points, pl.DataFrame(lines, schema=schema))
        caption = "Blue: a random change of the sublayers' matrices, a point a seed."
        if any(row["kind"] == "update" for row in rows):
            caption += " Orange: one step of the optimiser."
        charts.append(Chart(f"change-{anchor(label)}", f"Output change, {label}", caption, drawn, points))
    return charts


def _line(fit: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Points of a fitted law. Of those in log N and N the table holds the slope; the line goes through the
    means.
    """
    laws = {"log": math.log, "linear": float}
    own = [r for r in rows if r["kind"] == fit["kind"] and isinstance(r["change"], float)]
    depths, slope = sorted({row["depth"] for row in own}), fit["coefficient"]
    if not depths or not isinstance(slope, float):
        return
    if fit["law"] in laws:
        law = laws[fit["law"]]
        start = sum(row["change"] - slope * law(row["depth"]) for row in own) / len(own)
        values = [start + slope * law(depth) for depth in depths]
    elif isinstance(fit["exponent"], float):
        values = [slope * depth ** fit["exponent"] for depth in depths]
    else:
        return
    for depth, value in zip(depths, values, strict=True):
        changed = CHANGED.get(fit["kind"], fit["kind"])
        yield {"recipe": changed, "law": fit["law"], "depth": depth, "value": value}


def _updates(view: View) -> list[Chart]:
    rows = [
        {"kind": row["kind"].replace("_", "-"), "what": what, "parameter": row["parameter"],
         "relative": row[f"{short}_relative"]}
        for row in view.tables.get("updates", ())
        if not row["parameter"].endswith("bias")
        for what, short in (("gradient", "grad"), ("update", "update"))
    ]  # fmt: skip
    if not rows:
        return []
    found = frame(rows)
    kinds = [kind.replace("_", "-") for kind in KINDS]
    drawn = by_kind(found, kinds)
    return [Chart("updates", "Gradients and updates", "", drawn, found)]


def _attention(view: View) -> list[Chart]:
    renamed = [{**row, "theory": row.get("uniform")} for row in view.tables.get("attention", ())]
    uniform = View({"tables": {**view.tables, "attention": renamed}, "stacks": view.stacks})
    return _stacked(uniform, "attention", "entropy", ("Attention entropy", "nats"), apart=True)


def _similarity(view: View) -> list[Chart]:
    return [
        *_stacked(view, "similarity", "cosine", ("Cosine of tokens", "mean cosine")),
        *_stacked(view, "similarity", "effective_rank", ("Directions in use", "effective rank")),
    ]


def anchor(text: str) -> str:
    """A name for charts and links; different texts stay different."""
    return slug(text).removeprefix("recipe-")
