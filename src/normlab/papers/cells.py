"""Artefacts of normlab's own, with the words and values of the papers' TOML files; a table as named cells."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from normlab.papers.artefact import Artefact, Drawing, Measurement
from normlab.papers.claim import Claim
from normlab.papers.measures import OfRuns
from normlab.papers.trainings import Scale, Trainings


class PrintedTable(dict[str, float | str]):
    """The cells of a table in print, each under ``<column> <row>``, and what is published besides.

    A cell ``""`` was left empty in print and is left out. Raises ValueError for a row with another number of
    cells than there are columns.
    """

    def __init__(
        self, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]], **besides: float | str
    ) -> None:
        self.columns, self.rows = tuple(columns), tuple(rows)
        self.names = {(column, row): f"{column} {row}" for row in rows for column in columns}
        """The name of each cell by column and row."""
        for row, values in rows.items():
            if len(values) != len(columns):
                raise ValueError(
                    f"row {row!r} has {len(values)} cells for {len(columns)} columns; "
                    "write '' for an empty one"
                )
            self |= {self.names[c, row]: v for c, v in zip(columns, values, strict=True) if v != ""}
        self |= besides


def declare(
    id_: str,
    study: Callable[..., Measurement],
    *,
    claims: Sequence[Claim],
    settings: Mapping[str, Any] | None = None,
    measures: Mapping[str, OfRuns] | None = None,
    gpu: Mapping[str, OfRuns] | None = None,
    trainings: Mapping[Scale, Trainings] | None = None,
    drawings: Sequence[Drawing] = (),
) -> Artefact:
    """An artefact of normlab's own: what decides its verdicts, with its words and what is in print for it and
    its claims, from ``<paper's key>.toml``. ``measures``, and those of the ``gpu`` scale, are settings.
    """
    key, _, name = id_.partition(".")
    words: dict[str, Any] = {**words_of(key)[name], "published": printed_values(id_)}
    in_print = words.pop("claims", {})
    own = tuple(c if c.published else replace(c, published=in_print.get(c.measure, "")) for c in claims)
    of_runs = {name: some for name, some in (("measures", measures), ("gpu", gpu)) if some is not None}
    tests: dict[str, Any] = {"study": study, "claims": own, "settings": {**(settings or {}), **of_runs}}
    return Artefact(id_, **words, **tests, trainings=trainings or {}, drawings=drawings)


def printed_values(id_: str) -> Mapping[str, float | str]:
    """What is published for an artefact of normlab's own."""
    key, _, name = id_.partition(".")
    values = words_of(key)[name]["published"]
    if "columns" not in values:
        return values
    return PrintedTable(values["columns"], values["rows"], **values.get("besides", {}))


@cache
def words_of(key: str) -> Mapping[str, Any]:
    """The file of a paper: ``paper`` and its artefacts by name."""
    return tomllib.loads(Path(__file__).with_name(f"{key}.toml").read_text(encoding="utf-8"))
