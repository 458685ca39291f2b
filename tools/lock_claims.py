"""Writes tests/papers/claims.json: the fingerprint of every artefact that has a claim.

Run it when a claim is meant to change, and commit the file before the claim's result is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from normlab.papers import ARTEFACTS

LOCK = Path(__file__).parents[1] / "tests" / "papers" / "claims.json"


def fingerprints() -> dict[str, str]:
    """Id to fingerprint, of those with claims."""
    return {id_: artefact.fingerprint() for id_, artefact in ARTEFACTS.items() if artefact.claims}


def main() -> None:
    """Write the lock and say what is new in it."""
    old = json.loads(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    new = fingerprints()
    for id_ in sorted(old.keys() | new.keys()):
        if old.get(id_) != new.get(id_):
            print(f"{id_}: {old.get(id_, 'new')} -> {new.get(id_, 'gone')}")
    LOCK.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    print(f"{len(new)} claims in {LOCK}")


if __name__ == "__main__":
    main()
