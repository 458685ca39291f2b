"""No claim changes unnoticed, least of all after its result: claims.json holds what was claimed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from normlab.papers import ARTEFACTS
from normlab.spec.trainings import LAPTOP
from normlab.store.reproductions import KEPT, read_reproduction

LOCK = Path(__file__).with_name("claims.json")


def locked() -> dict[str, str]:
    assert LOCK.exists(), f"{LOCK.name} is missing; write it by tools/lock_claims.py"
    return json.loads(LOCK.read_text(encoding="utf-8"))


def changed(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """Ids whose claim is another one, or none any more, or is not in the lock."""
    return sorted(id_ for id_ in now.keys() | then.keys() if now.get(id_) != then.get(id_))


def unlocked(folder: Path, then: Mapping[str, str]) -> list[str]:
    """Results that were measured for another claim than the locked one."""
    found = [read_reproduction(path) for path in sorted(folder.glob("*.json"))]
    large = {one.id: ARTEFACTS[one.id].fingerprint(one.scale) for one in found if one.scale != LAPTOP}
    return [
        one.id for one in found if one.fingerprint != (then if one.scale == LAPTOP else large).get(one.id)
    ]


def test_claims_are_the_locked_ones():
    now = {id_: artefact.fingerprint() for id_, artefact in ARTEFACTS.items() if artefact.claims}
    others = changed(now, locked())
    assert not others, (
        f"the claims of {', '.join(others)} are no longer those of {LOCK.name}; if that is meant, run "
        "tools/lock_claims.py, commit, and measure them anew"
    )


def test_kept_results_are_of_the_locked_claims():
    others = unlocked(KEPT, locked())
    assert not others, (
        f"the results of {', '.join(others)} in {KEPT} were measured for other claims; measure them anew: "
        f"normlab reproduce {' '.join(others)}"
    )


def test_the_lock_bites(tmp_path):
    assert changed({"a.b": "1", "c.d": "2"}, {"a.b": "1", "c.d": "2"}) == []
    assert changed({"a.b": "1", "c.d": "2", "new.one": "3"}, {"a.b": "0", "c.d": "2", "old.one": "4"}) == [
        "a.b",
        "new.one",
        "old.one",
    ]
    from normlab.store.reproductions import write_reproduction
    from report.reproductions import ARTEFACT, found

    write_reproduction(found(), tmp_path)
    assert unlocked(tmp_path, {ARTEFACT.id: ARTEFACT.fingerprint()}) == []
    assert unlocked(tmp_path, {ARTEFACT.id: "another"}) == [ARTEFACT.id]
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks"):
        unlocked(tmp_path, {})
