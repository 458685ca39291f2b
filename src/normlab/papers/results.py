"""Reproductions as files: ``<folder>/<id>.json``, in the runs and among the results that normlab keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final, Literal, TypeAlias

from normlab.base.files import read_json, write_json_atomic
from normlab.base.io import NOT_FINITE, from_plain
from normlab.errors import UserError
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.estimate import Estimate
from normlab.papers.trainings import LAPTOP, SCALES, Scale

_PACKAGE: Final = Path(__file__).parents[1]
INSTALLED: Final = _PACKAGE / "papers" / "results"
RESULTS: Final = INSTALLED if INSTALLED.is_dir() else _PACKAGE.parents[1] / "results"
"""Kept results: a wheel holds them inside the package, a checkout in its folder ``results``."""
KEPT: Final = RESULTS / "papers"
"""Kept results of artefacts."""
State: TypeAlias = Literal["measured", "not all runs", "another text", "damaged", "not run", "answered"]
"""``not all runs``: today's trainings have more cells or more seeds; ``another text``: the built-in corpus
stood in for a text that was not there; ``answered``: it has no study of its own, only findings.
"""


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

    @property
    def measures(self) -> Mapping[str, Estimate]:
        """What was measured; empty if nothing was."""
        return {} if self.found is None else self.found.measures

    @property
    def whole(self) -> bool:
        """Whether it was measured, with all of its trainings, on the text that it asks for."""
        return self.state == "measured"


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
        # no advice to delete it: measuring again replaces it, and what is no JSON is told so already
        raise UserError(
            f"{path} holds no reproduction: {error}; to measure it again: {_again(path)}"
        ) from error
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
    first folder with a whole result, else from the first with any.

    ``where`` is what ``folders`` gives. A file that cannot be read counts only if there is no other.
    """
    scale = artefact.shown_at(scale)
    if not artefact.study:
        return ArtefactStatus(artefact, "answered")
    paths = [folder / f"{result_name(artefact.id, scale)}.json" for folder in where]
    return replace(best_of(artefact, paths), scale=scale)


def best_of(artefact: Artefact, paths: Iterable[Path]) -> ArtefactStatus:
    """Return the artefact's state by the best of some files, as ``standing`` chooses among them."""
    candidates = [_read(artefact, path) for path in paths if path.is_file()]
    not_run = ArtefactStatus(artefact, "not run")
    # of equally good ones max takes the first
    return max(candidates, key=lambda status: (status.whole, status.found is not None), default=not_run)


def at_other_scales(
    artefacts: Iterable[Artefact], where: Sequence[Path], shown: Scale = LAPTOP
) -> list[ArtefactStatus]:
    """Return the artefacts with a result at a scale other than the one ``shown``, scale by scale."""
    statuses = [
        standing(artefact, where, scale)
        for scale, artefact in product(SCALES, artefacts)
        if scale in artefact.trainings and scale != artefact.shown_at(shown)
    ]
    return [status for status in statuses if status.found is not None]


def disagreements(standings: Iterable[ArtefactStatus]) -> Iterator[str]:
    """Say which results disagree about a run that they share by content, once for each pair of artefacts: one
    of them was made from another training of the same configuration.
    """
    first_with: dict[str, tuple[str, Mapping[str, object]]] = {}
    named = set[tuple[str, str]]()
    for standing in standings:
        if standing.found is None:
            continue
        for row in standing.found.tables.get("runs", ()):
            run = str(row.get("run"))
            first, other = first_with.setdefault(run, (standing.artefact.id, row))
            pair = first, standing.artefact.id
            column = _differing(other, row)
            if column and pair not in named:
                named.add(pair)
                yield (
                    f"{first} and {pair[1]} disagree about run {run}, {column}: {_short(other[column])} and "
                    f"{_short(row[column])}. It was trained twice, and each holds one of the trainings; to "
                    f"measure both from the same: normlab papers reproduce {first} {pair[1]} --again"
                )


def _differing(row: Mapping[str, object], other: Mapping[str, object]) -> str:
    """The first column in which two rows of one run differ; empty if none does."""
    # Cells and seeds are the artefact's names for the run, and time is not a score.
    columns = [name for name in other if name in row and name not in ("cell", "seed", "seconds")]
    return next((name for name in columns if repr(row[name]) != repr(other[name])), "")


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _again(path: Path) -> str:
    """Return the command that measures again what a file should hold."""
    id_, _, scale = path.stem.partition("@")
    return f"normlab papers reproduce {id_}" + (f" --scale {scale}" if scale else "")


def _read(artefact: Artefact, path: Path) -> ArtefactStatus:
    try:
        reproduction = read_reproduction(path)
    except UserError as error:
        return ArtefactStatus(artefact, "damaged", path=path, trouble=str(error))
    return ArtefactStatus(artefact, _state(artefact, reproduction), reproduction, path)


def _state(artefact: Artefact, reproduction: Reproduction) -> State:
    """Say whether a result has a run of each of today's cells for each seed. Its seeds are places in the
    order of the seeds and not the seeds themselves, so it may have been measured with others.
    """
    if reproduction.stand_in:
        return "another text"
    if reproduction.scale not in artefact.trainings:
        return "measured"
    trainings = artefact.trainings[reproduction.scale]
    rows = reproduction.tables.get("runs", ())
    cells = {row.get("cell") for row in rows}
    if cells and not cells & set(trainings.cells):  # a study's own trainings, such as fine-tunings
        return "measured"
    there = {(row.get("cell"), row.get("seed")) for row in rows}
    planned = {(cell, place) for cell in trainings.cells for place in range(1, trainings.seeds + 1)}
    return "measured" if planned <= there else "not all runs"
