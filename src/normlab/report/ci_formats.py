"""The report of a check for continuous integration: JUnit's XML for test reports, SARIF for code scanning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from xml.etree import ElementTree

from normlab.report.results.check import CheckResult, Failure, Finding

UNALLOWED: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, section 2.2."""
SARIF: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


# --------------------------------------------------------------------------------------------------- JUnit


class _Case(NamedTuple):
    """A case of a test report: the answer about a property at a place."""

    property: str
    place: str = ""
    outcome: Literal["", "failure", "skipped"] = ""
    """Empty if it passes."""
    message: str = ""


def junit(reports: Sequence[Mapping[str, Any]]) -> str:
    """Write reports, each of them ``Report.to_dict()``, as JUnit's XML: a suite for each model, a case for
    each property, which passes, fails, or is skipped if it could not be tested or is allowed to fail.
    """
    root = ElementTree.Element("testsuites", name="normlab check")
    for report in reports:
        _add_suite(root, CheckResult.of(report))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return UNALLOWED.sub("\ufffd", text) + "\n"


def _add_suite(root: ElementTree.Element, result: CheckResult) -> None:
    cases = list(_cases(result))
    outcomes = [case.outcome for case in cases]
    name = result.title or result.model
    facts = {
        "name": name,
        "tests": str(len(cases)),
        "failures": str(outcomes.count("failure")),
        "errors": "0",
        "skipped": str(outcomes.count("skipped")),
        "time": f"{sum(result.seconds.values()):.3f}",
    }
    suite = ElementTree.SubElement(root, "testsuite", facts)
    for case in cases:
        label = f"{case.property}: {case.place}" if case.place else case.property
        time = f"{result.seconds.get(case.property, 0.0):.3f}"
        element = ElementTree.SubElement(suite, "testcase", classname=name, name=label, time=time)
        if case.outcome:
            ElementTree.SubElement(element, case.outcome, message=case.message).text = case.message


def _cases(result: CheckResult) -> Iterator[_Case]:
    for cause in result.failures:
        place = cause.module or "model"
        if result.is_allowed(cause):
            yield _Case(cause.property, place, "skipped", f"allowed: {_sentence(cause)}")
            continue
        yield _Case(cause.property, place, "failure", _sentence(cause))
        for effect in cause.follows:
            message = f"{_sentence(effect)}; explained by {cause.property} at {place}"
            yield _Case(effect.property, effect.module or "model", "failure", message)
    for name in result.holds:
        yield _Case(name)
    for name, reason in result.untestable.items():
        yield _Case(name, outcome="skipped", message=reason)


def _sentence(finding: Finding) -> str:
    """What was seen, and what to do about it."""
    return f"{finding.evidence}; {finding.advice}" if finding.advice else finding.evidence


# --------------------------------------------------------------------------------------------------- SARIF


def sarif(reports: Sequence[Mapping[str, Any]]) -> str:
    """Write reports as SARIF 2.1.0: a run for each model, and a result for each failure and note. Its logical
    location is the module's path, its physical location the one in ``sources`` of the report.
    """
    runs = [_run(CheckResult.of(report)) for report in reports]
    log = {"$schema": SARIF, "version": "2.1.0", "runs": runs}
    return json.dumps(log, ensure_ascii=False, indent=1, allow_nan=False)


def _run(result: CheckResult) -> dict[str, Any]:
    findings: list[Finding] = [*result.failures, *result.notes]
    names = list(dict.fromkeys(finding.property for finding in findings))
    rules = [
        {"id": name, "shortDescription": {"text": result.statements.get(name) or name}} for name in names
    ]
    driver = {"name": "normlab", "version": version("normlab"), "rules": rules}
    results = [_finding(result, finding, names) for finding in findings]
    return {"tool": {"driver": driver}, "results": results}


def _finding(result: CheckResult, finding: Finding, names: Sequence[str]) -> dict[str, Any]:
    """A failure or a note as a result of SARIF; ``names`` are the properties in the order of the rules."""
    entry: dict[str, Any] = {
        "ruleId": finding.property,
        "ruleIndex": names.index(finding.property),
        "level": "error" if isinstance(finding, Failure) else "note",
        "message": {"text": _sentence(finding)},
    }
    location = _location(result, finding.module)
    if location:
        entry["locations"] = [location]
    if finding.property in result.allowed:
        entry["suppressions"] = [{"kind": "external"}]
    return entry


def _location(result: CheckResult, module: str) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if module:
        location["logicalLocations"] = [{"fullyQualifiedName": module, "kind": "module"}]
    source = result.sources.get(module)
    if source is not None:
        file = Path(source.file)
        location["physicalLocation"] = {
            "artifactLocation": {"uri": file.as_uri() if file.is_absolute() else source.file},
            "region": {"startLine": source.line},
        }
    return location
