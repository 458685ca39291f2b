"""No claim changes unnoticed, least of all after its result: claims.json holds what was claimed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from carry_results import new_in
from cases import each
from lock_claims import LOCK, fingerprints
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Reproduction
from normlab.papers.claim import at_most
from normlab.papers.results import KEPT, locked_in, read_reproduction, result_name, superseded

CARRIED = json.loads(LOCK.with_name("carried.json").read_text(encoding="utf-8"))
"""Fingerprint to the earlier one that its result was measured for."""


def locked() -> dict[str, str]:
    return json.loads(LOCK.read_text(encoding="utf-8"))


def changed(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """Names whose claim is another one, or none any more, or is not in the lock."""
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def unlocked(folder: Path, then: Mapping[str, str]) -> list[str]:
    """Results that were measured for another claim than the locked one."""
    found = [read_reproduction(path) for path in sorted(folder.glob("*.json"))]
    return [one.id for one in found if one.fingerprint != then.get(result_name(one.id, one.scale))]


def test_claims_are_the_locked_ones():
    others = changed(fingerprints(), locked())
    assert not others, (
        f"the claims of {', '.join(others)} are no longer those of {LOCK.name}; if that is meant, run "
        "tools/lock_claims.py, commit, and measure them anew"
    )


def test_kept_results_are_of_the_locked_claims():
    others = unlocked(KEPT, locked())
    assert not others, (
        f"the results of {', '.join(others)} in {KEPT} were measured for other claims; measure them anew: "
        f"normlab papers reproduce {' '.join(others)}"
    )


@cache
def git(*arguments: str) -> str:
    command = ["git", "-C", str(LOCK.parent), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no history here: {found.stderr.strip()}")
    return found.stdout


def early(found: Reproduction, lock: Mapping[str, str], date: str) -> bool:
    """Whether a result was measured before its claim was locked, by a lock of that date."""
    held, fingerprint = False, found.fingerprint
    while fingerprint and not held:
        held, fingerprint = fingerprint in lock.values(), CARRIED.get(fingerprint)
    return not held or datetime.fromisoformat(found.began) < datetime.fromisoformat(date)


@each("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_no_result_was_measured_before_its_lock(path):
    found = read_reproduction(path)
    assert found.lock, "no commit locked it; commit tests/papers/claims.json, and measure it anew"
    lock = json.loads(git("show", f"{found.lock}:tests/papers/claims.json"))
    assert not early(found, lock, git("show", "-s", "--format=%cI", found.lock).strip())


NARROWED = [
    (a, last)
    for a in ARTEFACTS.values()
    for last in superseded(a.id)
    if last.found.fingerprint == CARRIED.get(a.fingerprint())
]
"""Artefacts that say less than when they were measured, with what they said then."""


def test_some_results_are_carried():
    assert NARROWED


@each("artefact, last", NARROWED, ids=lambda one: getattr(one, "id", ""))
def test_a_carried_result_is_the_earlier_one_without_what_is_no_longer_claimed(artefact, last):
    found = read_reproduction(KEPT / f"{artefact.id}.json")
    assert list(new_in(artefact.claims, last.claims)) == []
    if found.began == last.found.began:  # else it was measured again, for the claims as they were locked
        assert found.measures.items() <= last.found.measures.items()
        assert {name: [*rows] for name, rows in found.tables.items()} == last.found.tables


def test_only_a_claim_that_says_less_is_carried():
    then = at_most("a", 0.5, convention="few"), at_most("b", 0.5, check="by construction")
    assert list(new_in([at_most("a", 0.5, convention="few", part_of="both")], then)) == []
    assert list(new_in([at_most("a", 0.5, convention="few", check="it must")], then)) == []
    for claim in (at_most("a", 0.6, convention="few"), at_most("b", 0.5), at_most("c", 0.5)):
        assert list(new_in([claim], then)) == [claim]


def test_a_lock_that_came_later_or_holds_another_claim_is_seen():
    found = Reproduction("a.b", "1", {}, {}, {}, 1.0, lock="x", began="2026-11-26T10:00:00+00:00")
    assert not early(found, {"a.b": "1"}, "2026-11-26T09:59:59+00:00")
    assert early(found, {"a.b": "1"}, "2026-11-26T10:00:01+00:00")
    assert early(found, {"a.b": "2"}, "2026-11-26T09:59:59+00:00")


def test_the_commit_that_locked_a_claim_is_the_first_that_holds_it(tmp_path):
    lock, commits = tmp_path / "claims.json", []
    base = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*base, "init", "-q"], check=True)
    for text in ('{"a.b": "first"}', '{"a.b": "second"}', '{"a.b": "second", "c.d": "third"}'):
        lock.write_text(text)
        subprocess.run([*base, "add", "."], check=True)
        subprocess.run([*base, "commit", "-qm", "lock"], check=True)
        head = subprocess.run([*base, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commits.append(head.stdout.strip())
    assert [locked_in(one, lock) for one in ("first", "second", "third")] == commits
    assert locked_in("fourth", lock) == locked_in("first", tmp_path / "nowhere.json") == ""


def test_the_lock_bites(tmp_path):
    assert changed({"a.b": "1", "c.d": "2"}, {"a.b": "1", "c.d": "2"}) == []
    assert changed({"a.b": "1", "c.d": "2", "new.one": "3"}, {"a.b": "0", "c.d": "2", "old.one": "4"}) == [
        "a.b",
        "new.one",
        "old.one",
    ]
    from normlab.papers.results import write_reproduction
    from report.reproductions import ARTEFACT, found

    write_reproduction(found(), tmp_path)
    assert unlocked(tmp_path, {ARTEFACT.id: ARTEFACT.fingerprint()}) == []
    assert unlocked(tmp_path, {ARTEFACT.id: "another"}) == [ARTEFACT.id]
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks"):
        unlocked(tmp_path, {})
