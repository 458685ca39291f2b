"""The papers' tables and figures as data, one module or package per paper; no torch.

It stands on ``lab`` and all below it, and only ``cli`` and its own pages import it. A paper of your own is a
TOML file of regimes and findings (``normlab papers --paper FILE``). A module of your own adds tables and
figures by ``publish``, each with the function that measures it, and effects by ``effects.effect``
(``--import my_module``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final, NoReturn

from normlab.base.chart import Bars, Cells, Lines
from normlab.base.registry import Registry
from normlab.errors import UserError
from normlab.papers import apx, disputes, liu2020, nguyen2019, xiong2020
from normlab.papers.artefact import Artefact, Measurement, Paper
from normlab.papers.cells import words_of
from normlab.papers.estimate import Estimate

__all__ = [
    "ARTEFACTS",
    "PAPERS",
    "Artefact",
    "Bars",
    "Cells",
    "Estimate",
    "Lines",
    "Measurement",
    "Paper",
    "find_artefact",
    "keys",
    "publish",
    "refuse",
]

ARTEFACTS: Final[dict[str, Artefact]] = {
    value.id: value
    for module in (*xiong2020.MODULES, *nguyen2019.MODULES, *liu2020.MODULES, apx, disputes)
    for value in vars(module).values()
    if isinstance(value, Artefact)
}
"""Every artefact that the papers' modules define, then the public disputes, by id.

This is no ``Registry``: there are so many ids that an error names the nearest one instead of all.
"""
PAPERS: Final[Registry[Paper]] = Registry("paper")
"""The papers by key, with the public disputes as one more."""
for key in ("xiong2020", "nguyen2019", "liu2020", "apx", "disputes"):
    PAPERS[key] = Paper(key, **words_of(key)["paper"])


def publish(*artefacts: Artefact) -> None:
    """Add the artefacts of a paper. Raises UserError for an id that is taken."""
    for new in artefacts:
        if ARTEFACTS.setdefault(new.id, new) is not new:
            raise UserError(f"the artefact id {new.id!r} is taken; give yours another one")


def find_artefact(id_: str) -> Artefact:
    """Return the artefact with that id. Raises UserError with the nearest ids if there is none."""
    if id_ not in ARTEFACTS:
        refuse("table or figure", id_, ARTEFACTS)
    return ARTEFACTS[id_]


def keys() -> list[str]:
    """Return the papers' keys, such as liu2020, with those of artefacts whose paper has no findings."""
    return list(dict.fromkeys((*PAPERS, *(id_.partition(".")[0] for id_ in ARTEFACTS))))


def refuse(kind: str, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raise UserError: there is nothing of that kind and name, but perhaps a few with names like it."""
    # of names that differ in the case of letters alone, one is near enough
    by_lower_case = {one.lower(): one for one in allowed}
    close = [by_lower_case[lower] for lower in difflib.get_close_matches(name.lower(), by_lower_case, 3)]
    hint = f"; the nearest: {', '.join(close)}" if close else ""
    raise UserError(f"there is no {kind} {name!r}{hint}; normlab papers all lists all of them")
