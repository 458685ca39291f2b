"""Writes tests/papers/claims.json: the fingerprint of every artefact that has a claim, at each scale.

Run it when a claim is meant to change, and commit the file before the claim's result is measured. With
``--print`` it writes nothing, and prints the fingerprint of every artefact at every scale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from normlab.papers import ARTEFACTS
from normlab.papers.results import result_name
from normlab.papers.trainings import LAPTOP, SCALES

LOCK = Path(__file__).parents[1] / "tests" / "papers" / "claims.json"


def fingerprints() -> dict[str, str]:
    """Name of the result to fingerprint, of those with claims, at every scale at which they are trained."""
    return {
        result_name(a.id, scale): a.fingerprint(scale)
        for a in ARTEFACTS.values()
        if a.claims
        for scale in (a.trainings or (LAPTOP,))
    }


def main() -> None:
    """Write the lock and say what is new in it, or print all fingerprints."""
    if "--print" in sys.argv:
        print("\n".join(f"{a.id} {s} {a.fingerprint(s)}" for a in ARTEFACTS.values() for s in SCALES))
        return
    old = json.loads(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    new = fingerprints()
    for id_ in sorted(old.keys() | new.keys()):
        if old.get(id_) != new.get(id_):
            print(f"{id_}: {old.get(id_, 'new')} -> {new.get(id_, 'gone')}")
    LOCK.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    print(f"{len(new)} fingerprints in {LOCK}")


if __name__ == "__main__":
    main()
