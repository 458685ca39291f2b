"""Sentences about both placements, answered by what was measured for other artefacts."""

from __future__ import annotations

from collections.abc import Mapping

from normlab.errors import UserError
from normlab.papers import artefact, study
from normlab.reproduce.lab import Lab
from normlab.spec.artefact import Measurement, Reproduction
from normlab.store.reproductions import folders, standing


@study
def answers(lab: Lab, *, rows: Mapping[str, tuple[str, str]]) -> Measurement:
    """Measures of other artefacts under names of one's own, each given as an artefact's id and its measure.

    Raises UserError for an artefact that was not measured for today's claims.
    """
    found = {id_: _result(lab, id_) for id_, _ in rows.values()}
    measures = {name: found[id_].measures[measure] for name, (id_, measure) in rows.items()}
    table = [
        {"sentence": name, "artefact": id_, "measure": measure, "fingerprint": found[id_].fingerprint}
        for name, (id_, measure) in rows.items()
    ]
    return Measurement(measures, {"rows": table}, {"rests on": ", ".join(found)})


def _result(lab: Lab, id_: str) -> Reproduction:
    now = standing(artefact(id_), folders(lab.root))
    if now.found is None or not now.fresh:
        raise UserError(f"this rests on {id_}, which is {now.state}; type first: normlab reproduce {id_}")
    return now.found
