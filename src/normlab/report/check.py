"""The report of a check as a page, as JUnit's XML for test reports, and as SARIF for code scanning."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from normlab.base.units import count, duration
from normlab.report.page import Block, Cell, Code, Details, Page, PageTable, Section, Text, breakable, capital


def check_page(report: Mapping[str, Any]) -> Page:
    """The page of ``Report.to_dict()``, to which ``title`` and ``command`` may be added."""
    allowed, holds = report.get("allowed", ()), report["holds"]
    first = next((one for one in report["failures"] if one["property"] not in allowed), None)
    kept = "property holds" if len(holds) == 1 else "properties hold"
    unjudged, inapplicable = _untested(report)
    lead = f"{len(holds)} {kept}, {len(unjudged)} could not be tested, {len(inapplicable)} do not apply."
    if len(report["failures"]) and first is None:
        lead += " What fails is allowed to."
    nothing = "Nothing fails"
    if report.get("verdict") == "undecided":
        nothing = f"Too little could be judged: {report['judged']} of {report['applicable']} properties"
    return Page(
        title=str(report.get("title") or f"Check of {report['model']}"),
        headline=f"{_property(first)} fails at {_place(first)}" if first else nothing,
        facts=[f"{name} {value}" for name, value in report["facts"].items()],
        lead=f"{capital(first['evidence'])}. {lead}" if first else lead,
        blocks=list(_sections(report)),
    )


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    states = report["statements"]
    if report["failures"]:
        allowed = report.get("allowed", ())
        failures = [block for one in report["failures"] for block in _failure(one, states, allowed)]
        yield Section("What fails", failures, "failures")
    if report["notes"]:
        caption = "Unusual, but perhaps intended: nothing here fails a check."
        yield Section("Notes", [_places(report["notes"], caption)], "notes")
    unjudged, inapplicable = _untested(report)
    if unjudged:
        yield Section("What could not be tested", [_reasons(unjudged, states)], "untestable")
    rows = [
        [Cell(breakable(n)), Cell(states.get(n, "")), Cell(duration(report["seconds"].get(n, 0.0)))]
        for n in report["holds"]
    ]
    holds: list[Block] = [PageTable(("property", "what it states", "time"), rows, text_columns=2)]
    yield Section("What holds", holds if rows else [Text("Nothing of what could be tested.")], "holds")
    if inapplicable:
        yield Section("What does not apply", [_reasons(inapplicable, states)], "inapplicable")
    if report.get("command"):
        yield Section("How it was made", [Code(str(report["command"]))], "how")


def _untested(report: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Why properties that apply were not judged, and why others do not apply, as far as the step shows."""
    unjudged, inapplicable = dict[str, str](), dict[str, str]()
    applies = report.get("unjudged", report["untestable"])  # kept reports may not tell them apart
    for name, why in report["untestable"].items():
        group = unjudged if name in applies else inapplicable
        group[name] = why
    return unjudged, inapplicable


def _reasons(untested: Mapping[str, str], states: Mapping[str, str]) -> PageTable:
    rows = [[Cell(breakable(name), states.get(name, "")), Cell(why)] for name, why in untested.items()]
    return PageTable(("property", "why"), rows, text_columns=2)


def _failure(one: Mapping[str, Any], states: Mapping[str, str], allowed: Collection[str]) -> Iterator[Block]:
    if one["property"] in allowed:
        yield Text(f"{_property(one)} fails at {_place(one)}, as it is allowed to: {one['evidence']}.")
    else:
        yield Text(f"{_property(one)} fails at {_place(one)}: {one['evidence']}.", "alarm")
    if statement := states.get(one["property"]):
        yield Text(f"What should hold: {statement}", "note")
    if one["advice"]:
        yield Text(f"What to do: {one['advice']}.")
    if follows := one["follows"]:
        yield Details(f"What it explains: {count(len(follows), 'further failure')}", [_places(follows)])


def _places(found: Sequence[Mapping[str, Any]], caption: str = "") -> PageTable:
    rows = [[Cell(breakable(v["property"])), Cell(_place(v)), Cell(v["evidence"])] for v in found]
    return PageTable(("property", "place", "seen"), rows, caption, text_columns=3)


def _property(found: Mapping[str, Any]) -> str:
    return capital(found["property"].replace("_", " "))


def _place(found: Mapping[str, Any]) -> str:
    return found["module"] or "the model"


UNALLOWED: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, section 2.2."""
SARIF: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def junit(reports: Sequence[Mapping[str, Any]]) -> str:
    """Write reports, each of them ``Report.to_dict()``, as JUnit's XML: a suite for each model, a case for
    each property, which passes, fails, or is skipped if it could not be tested or is allowed to fail.
    """
    root = ElementTree.Element("testsuites", name="normlab check")
    for one in reports:
        cases = list(_cases(one))
        kinds = [kind for _, _, kind, _ in cases]
        name, seconds = str(one.get("title") or one["model"]), one["seconds"]
        counted = {"tests": len(kinds), "failures": kinds.count("failure"), "errors": 0}
        counted["skipped"] = kinds.count("skipped")
        facts = {"name": name, **{key: str(n) for key, n in counted.items()}}
        suite = ElementTree.SubElement(root, "testsuite", facts, time=f"{sum(seconds.values()):.3f}")
        for tested, place, kind, said in cases:
            label = f"{tested}: {place}" if place else tested
            time = f"{seconds.get(tested, 0.0):.3f}"
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=label, time=time)
            if kind:
                ElementTree.SubElement(case, kind, message=said).text = said
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return UNALLOWED.sub("\ufffd", text) + "\n"


def _cases(one: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each answer the property, the place, its kind, and the sentence about it."""
    for cause in one["failures"]:
        if cause["property"] in one.get("allowed", ()):
            yield cause["property"], cause["module"] or "model", "skipped", f"allowed: {_sentence(cause)}"
            continue
        yield cause["property"], cause["module"] or "model", "failure", _sentence(cause)
        for v in cause["follows"]:
            said = f"{_sentence(v)}; explained by {cause['property']} at {cause['module'] or 'model'}"
            yield v["property"], v["module"] or "model", "failure", said
    for name in one["holds"]:
        yield name, "", "", ""
    for name, why in one["untestable"].items():
        yield name, "", "skipped", why


def _sentence(found: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (found["evidence"], found.get("advice"))))


def sarif(reports: Sequence[Mapping[str, Any]]) -> str:
    """Write reports as SARIF 2.1.0: a run for each model, and a result for each failure and note. Its logical
    location is the module's path, its physical location the one in ``sources`` of the report.
    """
    log = {"$schema": SARIF, "version": "2.1.0", "runs": [_run(one) for one in reports]}
    return json.dumps(log, ensure_ascii=False, indent=1, allow_nan=False)


def _run(one: Mapping[str, Any]) -> dict[str, Any]:
    results = [*(("error", f) for f in one["failures"]), *(("note", n) for n in one["notes"])]
    names = list(dict.fromkeys(found["property"] for _, found in results))
    states = one["statements"]
    rules = [{"id": name, "shortDescription": {"text": states.get(name) or name}} for name in names]
    driver = {"name": "normlab", "version": version("normlab"), "rules": rules}
    return {"tool": {"driver": driver}, "results": [_result(level, f, names, one) for level, f in results]}


def _result(
    level: str, found: Mapping[str, Any], names: Sequence[str], one: Mapping[str, Any]
) -> dict[str, Any]:
    place: dict[str, Any] = {}
    if found["module"]:
        place["logicalLocations"] = [{"fullyQualifiedName": found["module"], "kind": "module"}]
    if source := one.get("sources", {}).get(found["module"]):
        file, region = Path(source["file"]), {"startLine": source["line"]}
        artifact = {"uri": file.as_uri() if file.is_absolute() else source["file"]}
        place["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    return {
        "ruleId": found["property"],
        "ruleIndex": names.index(found["property"]),
        "level": level,
        "message": {"text": _sentence(found)},
        **({"locations": [place]} if place else {}),
        **({"suppressions": [{"kind": "external"}]} if found["property"] in one.get("allowed", ()) else {}),
    }
