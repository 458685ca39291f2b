"""Sentences about both placements, answered by what was measured for other artefacts."""

from __future__ import annotations

from collections.abc import Mapping

from normlab.errors import UserError
from normlab.papers import find_artefact
from normlab.papers.artefact import Measurement, Reproduction
from normlab.papers.lab import Lab
from normlab.papers.results import folders, standing
from normlab.papers.trainings import SCALES


def answers(lab: Lab, *, rows: Mapping[str, tuple[str, str]]) -> Measurement:
    """Measures of other artefacts under names of one's own, each given as an artefact's id and its measure,
    at the largest scale at which it was measured. One that no scale has yet is left out.

    Raises UserError for an artefact that was not measured for today's claims.
    """
    results = {name: (*row, _result(lab, *row)) for name, row in rows.items()}
    measured = {name: row for name, row in results.items() if row[1] in row[2].measures}
    table = [
        {
            "sentence": name,
            "artefact": id_,
            "measure": measure,
            "scale": one.scale,
            "fingerprint": one.fingerprint,
        }
        for name, (id_, measure, one) in measured.items()
    ]
    ids = ", ".join(dict.fromkeys(id_ for id_, _ in rows.values()))
    values = {name: one.measures[measure] for name, (_, measure, one) in measured.items()}
    return Measurement(values, {"rows": table}, {"rests on": ids})


def _result(lab: Lab, id_: str, measure: str) -> Reproduction:
    now = [standing(find_artefact(id_), folders(lab.root), scale) for scale in SCALES]
    fresh = [s.found for s in now if s.found is not None and s.fresh]
    if not fresh:
        raise UserError(
            f"this rests on {id_}, which is {now[0].state}; type first: normlab papers reproduce {id_}"
        )
    return next((one for one in reversed(fresh) if measure in one.measures), fresh[0])
