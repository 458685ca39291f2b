"""What the words of a command line stand for: findings, tables and figures, and whole papers; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from normlab import papers
from normlab.papers.artefact import Artefact
from normlab.papers.finding import Finding

Named: TypeAlias = Finding | Artefact | str
"""A finding, an artefact, or the key of a paper, which stands for all of the paper's."""


def named(words: Iterable[str], findings: Mapping[str, Finding]) -> list[Named]:
    """Return what words name, in their order: a finding or an artefact by its id, or a paper by its key;
    ``all`` names every paper.

    Upper and lower case count only where names differ in nothing else: x1 is X1, unless there is an x1.

    Raises UserError with the nearest names for a word that names nothing.
    """
    keys = papers.keys()
    by_name: dict[str, Sequence[Named]] = {
        "all": keys,
        **{key: [key] for key in keys},
        **{id_: [artefact] for id_, artefact in papers.ARTEFACTS.items()},
        **{id_: [finding] for id_, finding in findings.items()},
    }
    things: list[Named] = []
    for word in words:
        alike = [name for name in by_name if name.lower() == word.lower()]
        if not alike:
            papers.refuse("finding, table, figure or paper", word, by_name)
        for name in [word] if word in alike else alike:
            things += by_name[name]
    return things


def of_paper(key: str) -> list[Artefact]:
    """Return the artefacts of a paper."""
    return [artefact for id_, artefact in papers.ARTEFACTS.items() if id_.partition(".")[0] == key]


def artefacts_of(things: Iterable[Named]) -> list[Artefact]:
    """Return the artefacts that things stand for, each once: of a finding, those that it rests on.

    Raises UserError if a finding names an artefact that there is not.
    """
    by_id: dict[str, Artefact] = {}
    for thing in things:
        match thing:
            case Artefact():
                artefacts = [thing]
            case Finding():
                artefacts = [papers.find_artefact(id_) for id_ in thing.artefacts]
            case _:
                artefacts = of_paper(thing)
        by_id |= {artefact.id: artefact for artefact in artefacts}
    return list(by_id.values())
