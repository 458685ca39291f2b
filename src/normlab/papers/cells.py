"""Declares normlab's own artefacts, with words and values from the papers' TOML files, and printed tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from normlab.base.chart import Drawing, Lines
from normlab.papers.artefact import Artefact
from normlab.papers.measures import OfWeights
from normlab.papers.studies import TRAININGS, OwnStudy
from normlab.papers.trainings import LAPTOP, SCALES, Scale, ScaledTraining, Trainings, changed

CURVES: Final = (
    Lines("curves", "Dev BLEU through training", "step", "bleu", "step", "BLEU", group="cell"),
    Lines("curves", "Dev NLL through training", "step", "nll", "step", "nats per token", group="cell"),
)
"""The charts of trainings if the paper's file has no others."""
S = TypeVar("S", bound=ScaledTraining)


class PrintedTable(dict[str, float | str]):
    """The cells of a printed table, each under ``<column> <row>``, and what else is published.

    A cell ``""`` was empty in print and is left out. Raises ValueError for a row that does not have one cell
    per column.
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
    study: str = "",
    *,
    settings: Mapping[str, Any] | None = None,
    measures: Mapping[str, OfWeights] | None = None,
    trainings: Mapping[Scale, Trainings] | None = None,
    **more: Any,
) -> Artefact:
    """Return an artefact of normlab's own: how it is measured, plus its words, its drawings, and what is in
    print for it, from ``<paper's key>.toml``. Without the name of a ``study`` (see ``OwnStudy``) it has the
    tables of its trainings; ``measures`` are taken of their weights. ``more`` holds other fields of an
    ``Artefact``.
    """
    words = dict(_words(id_))
    scales = words.pop("scales", {})
    if isinstance(scales, str):
        scales = dict.fromkeys(SCALES, scales)
    drawings = words.pop("drawings", words_of(id_.partition(".")[0]).get("drawings"))
    if drawings is None:
        charts = CURVES if trainings else ()
    else:
        charts = tuple(Drawing.from_plain({"kind": "Lines", **drawing}) for drawing in drawings)
    if study:
        measured_by = OwnStudy.named(study)
    else:
        measured_by = TRAININGS if trainings else None
    fields: dict[str, Any] = {
        **words,
        "published": printed_values(id_),
        "beside": _counterparts(id_),
        "study": measured_by,
        "settings": {**(settings or {}), **({"measures": measures} if measures else {})},
        "trainings": {
            scale: replace(runs, differs=f"{runs.differs} {scales.get(scale, '')}".strip())
            for scale, runs in (trainings or {}).items()
        },
        "drawings": charts,
    }
    return Artefact(id_, **fields, **more)


def settings_of(id_: str, **of: S) -> dict[Scale, S]:
    """Return settings by scale, with the words that the paper's file has for them under ``<key>.<name>``."""
    key, _, name = id_.partition(".")
    words = words_of(key)["settings"]
    return {
        scale: replace(of[scale], differs=words[name][scale].format(open=words.get("open", "")))
        for scale in SCALES
        if scale in of
    }


def with_laptop(
    of: Mapping[Scale, S], id_: str = "", base: Mapping[str, Any] | None = None, **values: Any
) -> dict[Scale, S]:
    """Return settings whose laptop scale has its own values, those of the ``base`` under names like
    ``optim.lr``; and its own words, as in ``settings_of``, if it has an id.
    """
    laptop = replace(of[LAPTOP], base=changed(of[LAPTOP].base, base or {}), **values)
    at_laptop = settings_of(id_, laptop=laptop) if id_ else {LAPTOP: laptop}
    return {**of, **at_laptop}


def printed_values(id_: str) -> Mapping[str, float | str]:
    """Return what is published for an artefact of normlab's own."""
    values = _words(id_)["published"]
    if "columns" in values:
        return PrintedTable(values["columns"], values["rows"], **values.get("besides", {}))
    return {name: value["printed"] if isinstance(value, dict) else value for name, value in values.items()}


def _counterparts(id_: str) -> dict[str, Sequence[str]]:
    """Return the measures and trained cells that tell of a printed value under other names, by its name."""
    values = _words(id_)["published"]
    if "columns" in values:
        return {}
    return {name: value["here"] for name, value in values.items() if isinstance(value, dict)}


def _words(id_: str) -> Mapping[str, Any]:
    key, _, name = id_.partition(".")
    return words_of(key)[name]


@cache
def words_of(key: str) -> Mapping[str, Any]:
    """Return the file of a paper: ``paper``, its ``settings``, its artefacts by name, and the ``drawings`` of
    those that have none of their own.
    """
    return tomllib.loads(Path(__file__).with_name(f"{key}.toml").read_text(encoding="utf-8"))
