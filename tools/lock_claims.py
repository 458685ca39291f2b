"""Writes tests/papers/claims.json: the fingerprint of every artefact that has a claim, at each scale.

Run it when a claim is meant to change, and commit the file before the claim's result is measured.
"""

from __future__ import annotations

import json

from normlab.papers import ARTEFACTS
from normlab.papers.results import LOCK, result_name
from normlab.papers.trainings import LAPTOP


def fingerprints() -> dict[str, str]:
    """Name of the result to fingerprint, of those with claims, at every scale at which they are trained."""
    return {
        result_name(a.id, scale): a.fingerprint(scale)
        for a in ARTEFACTS.values()
        if a.claims
        for scale in (a.trainings or (LAPTOP,))
    }


def main() -> None:
    """Write the lock and say what is new in it."""
    old = json.loads(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    new = fingerprints()
    for id_ in sorted(old.keys() | new.keys()):
        if old.get(id_) != new.get(id_):
            print(f"{id_}: {old.get(id_, 'new')} -> {new.get(id_, 'gone')}")
    LOCK.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    print(f"{len(new)} fingerprints in {LOCK}")


if __name__ == "__main__":
    main()
