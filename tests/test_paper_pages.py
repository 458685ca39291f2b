"""The pages of the papers are what claims and kept results say today."""

from functools import cache

import findings
import papers as tool
from normlab.papers import ARTEFACTS, PAPERS

STALE = f"docs/papers is not what claims and results say; type: {tool.COMMAND}"

written = cache(tool.written)


def test_a_page_is_what_claims_and_results_say():
    stale = [path.name for path, text in written().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], STALE


def test_every_artefact_is_of_a_paper():
    assert {id_.partition(".")[0] for id_ in ARTEFACTS} == PAPERS.keys()


def test_what_differs_has_a_reason_or_says_that_there_is_none_yet():
    differing = [
        part
        for text in written().values()
        for part in text.partition("## Claims that were changed")[0].split("\n### ")[1:]
        if "| does not hold |" in part
    ]
    assert differing
    for part in differing:
        *_, why = part.strip().split("\n\n")
        assert why.endswith(".")
        assert not why.startswith(("- ", "|"))


def test_every_claim_is_on_its_page_with_its_verdict():
    for one in tool.standings().values():
        part = tool.artefact(one)
        rows = [
            line
            for line in part.splitlines()
            if line.endswith(("holds |", "does not hold |", "passes |", "undecided |"))
        ]
        assert len(rows) == (len(one.artefact.claims) if one.fresh else 0), one.artefact.id


def test_the_table_of_findings_is_what_results_say():
    book = findings.BOOK.read_text(encoding="utf-8")
    assert findings.written(book) == book, f"type: {findings.COMMAND}"


def test_every_pattern_of_a_finding_names_claims():
    patterns = [pattern for some in findings.FINDINGS.values() for pattern in some]
    assert all([*findings.verdicts(pattern)] for pattern in patterns)


def test_artefacts_that_contradict_each_other_are_said(monkeypatch):
    given = {"a.b": ["agrees"], "c.d": ["disagrees", "undecided"]}
    monkeypatch.setattr(findings, "rows", lambda: iter([("it holds", given)]))
    assert findings.table().endswith(
        "| it holds | `a.b` agrees; `c.d` disagrees 1 of 2, undecided 1 of 2 | they disagree |"
    )


def test_the_open_claims_are_those_that_count_and_are_not_decided():
    rows = [line for line in written()[tool.OPEN].splitlines() if line.startswith("| `")]
    verdicts = [
        claim.verdict(one.found.measures if one.fresh and one.found is not None else {})
        for one in tool.standings().values()
        for claim in one.artefact.claims
        if not claim.check
    ]
    assert len(rows) == sum(verdict in ("undecided", "not run") for verdict in verdicts) > 0
    assert all(row.count("|") - row.count("\\|") == 4 for row in rows)
