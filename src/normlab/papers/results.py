"""Reproductions as files: ``<folder>/<id>.json``, in the runs and among the results that normlab keeps."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from normlab.base.files import read_json, write_json_atomic
from normlab.base.io import NOT_FINITE, from_plain
from normlab.errors import UserError
from normlab.papers.artefact import Artefact, Reproduction, Superseded
from normlab.papers.claim import VERDICTS, Measure, Verdict
from normlab.papers.trainings import LAPTOP, SCALES, Scale

_PACKAGE: Final = Path(__file__).parents[1]
INSTALLED: Final = _PACKAGE / "papers" / "results"
KEPT: Final = INSTALLED if INSTALLED.is_dir() else _PACKAGE.parents[1] / "results" / "papers"
"""Kept results: a wheel holds them inside the package, a checkout in its folder ``results/papers``."""
SUPERSEDED: Final = "superseded"
"""Folder of the results for earlier versions of claims, below the kept ones."""
State: TypeAlias = Verdict | Literal["checked", "stale", "damaged", "no study yet"]
"""``checked`` is an artefact whose claims are all checks, and all pass."""
STATES: Final[tuple[State, ...]] = (*reversed(VERDICTS), "checked", "stale", "damaged", "no study yet")


@dataclass(frozen=True)
class ArtefactStatus:
    """An artefact with its state and the measurement behind it."""

    artefact: Artefact
    state: State
    found: Reproduction | None = None
    path: Path | None = None
    """The file that was read, or could not be read."""
    trouble: str = ""
    """Why the file could not be read."""
    scale: Scale = LAPTOP
    """The scale of the trainings that were asked for or measured."""
    before: tuple[Superseded, ...] = ()
    """Earlier versions of the claims, the first one first."""

    @property
    def measures(self) -> Mapping[str, Measure]:
        """What was measured; empty if nothing was."""
        return {} if self.found is None else self.found.measures

    @property
    def fresh(self) -> bool:
        """Whether the result was measured for today's claim, and on the text that the claim is about."""
        found = self.found
        return found is not None and not found.stand_in and _current(self.artefact, found)

    @property
    def whole(self) -> bool:
        """Whether the result is ``fresh`` and has all of its trainings."""
        found = self.found
        if not self.fresh or found is None or found.scale not in self.artefact.trainings:
            return self.fresh
        trainings = self.artefact.trainings[found.scale]
        own = [row for row in found.tables.get("runs", ()) if row["cell"] in trainings.cells]
        others = len(found.tables.get("runs", ())) - len(own)  # a study's own trainings, as fine-tunings
        return len(own) == len(trainings.cells) * trainings.seeds or others > 0


def folders(runs: Path) -> tuple[Path, ...]:
    """Return the folders that are searched for reproductions, in order."""
    return runs / "papers", KEPT


def write_reproduction(found: Reproduction, folder: Path) -> Path:
    """Write ``<folder>/<id>.json``, or ``<id>@<scale>.json``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result_name(found.id, found.scale)}.json"
    write_json_atomic(path, found, flat=True)
    return path


def read_reproduction(path: Path) -> Reproduction:
    """Read a file of ``write_reproduction``.

    Raises UserError if the file is damaged, or holds a different artefact than its name says.
    """
    try:
        stored: Reproduction = from_plain(Reproduction, read_json(path))
    except UserError as error:
        raise UserError(f"{path} holds no reproduction: {error}; delete it, then: {_again(path)}") from error
    name = result_name(stored.id, stored.scale)
    if name != path.stem:
        raise UserError(
            f"{path} holds the reproduction of {name}; name it {name}.json, or delete it and type: "
            f"{_again(path)}"
        )
    tables = {
        name: tuple({key: float(v) if v in NOT_FINITE else v for key, v in row.items()} for row in rows)
        for name, rows in stored.tables.items()
    }
    return replace(stored, tables=tables)


def result_name(id_: str, scale: Scale) -> str:
    """Return the name of a reproduction's files without their ending."""
    return id_ if scale == LAPTOP else f"{id_}@{scale}"


def standing(artefact: Artefact, where: Sequence[Path], scale: Scale = LAPTOP) -> ArtefactStatus:
    """Return the artefact's state at a scale, or at its smallest if it trains nothing at that one: from the
    first folder with a result for today's claim, else from the first with any.

    ``where`` is what ``folders`` gives. A file that cannot be read counts only if there is no other.
    """
    before = superseded(artefact.id)
    scale = artefact.shown_at(scale)
    if not artefact.study:
        return ArtefactStatus(artefact, "no study yet", before=before)
    file = f"{result_name(artefact.id, scale)}.json"
    seen = [_read(artefact, path) for folder in where if (path := folder / file).is_file()]
    none = ArtefactStatus(artefact, "not run")
    found = max(seen, key=lambda one: (one.fresh, one.found is not None), default=none)
    return replace(found, scale=scale, before=before)


def at_other_scales(
    artefacts: Iterable[Artefact], where: Sequence[Path], shown: Scale = LAPTOP
) -> list[ArtefactStatus]:
    """Return the artefacts with a result at a scale other than the one ``shown``, scale by scale."""
    several = list(artefacts)
    asked = [(a, s) for s in SCALES for a in several if s in a.trainings and s != a.shown_at(shown)]
    return [found for a, scale in asked if (found := standing(a, where, scale)).found is not None]


def disagreements(standings: Iterable[ArtefactStatus]) -> Iterator[str]:
    """Say which results for today's claims disagree about a run that they share by content, once for each
    pair of artefacts: one of them was made from another training of the same configuration.
    """
    seen: dict[str, tuple[str, Mapping[str, object]]] = {}
    told = set[tuple[str, str]]()
    for standing in standings:
        if standing.found is None or not standing.fresh:
            continue
        for row in standing.found.tables.get("runs", ()):
            run = str(row.get("run"))
            first, other = seen.setdefault(run, (standing.artefact.id, row))
            pair = first, standing.artefact.id
            # Cells and seeds are the artefact's names for the run, and time is not a score.
            names = [name for name in row if name in other and name not in ("cell", "seed", "seconds")]
            differing = next((name for name in names if repr(row[name]) != repr(other[name])), None)
            if differing is not None and pair not in told:
                told.add(pair)
                values = (other[differing], row[differing])
                one, two = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in values)
                yield (
                    f"{first} and {pair[1]} disagree about run {run}, {differing}: {one} and {two}. It was "
                    "trained twice, and each holds one of the trainings; to measure both from the same: "
                    f"normlab papers reproduce {first} {pair[1]} --again"
                )


def superseded(id_: str) -> tuple[Superseded, ...]:
    """Return the earlier versions of an artefact's claims, kept under their fingerprints.

    Raises UserError for a damaged file.
    """
    paths = (KEPT / SUPERSEDED).glob(f"{id_}.*.json")
    found: list[Superseded] = [from_plain(Superseded, read_json(path)) for path in paths]
    return tuple(sorted(found, key=lambda one: one.version))


def write_superseded(artefact: Artefact, found: Reproduction) -> Path:
    """Write the artefact's claims and what was measured for them as an earlier version; return the path."""
    fields = (artefact.version, artefact.date, artefact.reason, artefact.asserts, artefact.claims)
    path = KEPT / SUPERSEDED / f"{artefact.id}.{found.fingerprint}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, Superseded(*fields, found), flat=True)
    return path


def _again(path: Path) -> str:
    """Return the command that measures again what a file should hold."""
    id_, _, scale = path.stem.partition("@")
    return f"normlab papers reproduce {id_}" + (f" --scale {scale}" if scale else "")


def _current(artefact: Artefact, found: Reproduction) -> bool:
    return found.fingerprint == artefact.fingerprint(found.scale)


def _read(artefact: Artefact, path: Path) -> ArtefactStatus:
    try:
        found = read_reproduction(path)
    except UserError as error:
        return ArtefactStatus(artefact, "damaged", path=path, trouble=str(error))
    state: State = _state(artefact, found) if _current(artefact, found) else "stale"
    return ArtefactStatus(artefact, state, found, path)


def _state(artefact: Artefact, found: Reproduction) -> State:
    tally = found.tally(artefact.claims)
    only_checks = not tally.claims and tally.passed == tally.checks > 0
    return "checked" if only_checks and not found.stand_in else found.verdict(artefact.claims)


LOCK: Final = Path(__file__).parents[3] / "tests" / "papers" / "claims.json"


def locked_in(fingerprint: str, lock: Path = LOCK) -> str:
    """Return the hash of the commit that locked a claim, the first whose ``claims.json`` holds its
    fingerprint; empty if the claim is not locked, and outside a checkout.
    """
    if not lock.is_file():
        return ""
    log = f"git log --reverse --format=%H -S {fingerprint} -- {lock.name}".split()
    found = subprocess.run(log, cwd=lock.parent, capture_output=True, text=True, check=False)
    return found.stdout.partition("\n")[0]
