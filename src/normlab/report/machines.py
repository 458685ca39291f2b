"""A diagnosis for other programs: as JUnit's XML for test reports, and as SARIF for code scanning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final
from xml.etree import ElementTree

LEVELS: Final = {"problem": "error", "warning": "warning", "note": "note"}
"""SARIF's words for severities."""
UNALLOWED: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, section 2.2."""
SARIF: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def junit(diagnoses: Sequence[Mapping[str, Any]]) -> str:
    """Write diagnoses, each of them ``Diagnosis.to_plain()``, as JUnit's XML: a suite for each model, a case
    for each study that ran, and a failing case for each problem or warning.
    """
    root = ElementTree.Element("testsuites", name="normlab preflight")
    for one in diagnoses:
        grave = [f for f in one["findings"] if f["severity"] != "note"]
        cases = len(one["seconds"]) + len(grave)
        name = str(one.get("title") or one["model"])
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(cases),
            failures=str(len(grave)),
            errors="0",
            skipped="0",
            time=f"{sum(one['seconds'].values()):.3f}",
        )
        for study, seconds in one["seconds"].items():
            ElementTree.SubElement(suite, "testcase", classname=name, name=study, time=f"{seconds:.3f}")
        for found in grave:
            where = found["module"] or found["table"] or "model"
            case = ElementTree.SubElement(
                suite, "testcase", classname=name, name=f"{found['name']}: {where}", time="0.000"
            )
            failure = ElementTree.SubElement(
                case, "failure", message=found["sentence"], type=found["severity"]
            )
            failure.text = "\n".join(filter(None, (found["sentence"], found["do"])))
    ElementTree.indent(root)
    return (
        UNALLOWED.sub("\ufffd", ElementTree.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"
    )


def sarif(diagnoses: Sequence[Mapping[str, Any]]) -> str:
    """Write diagnoses as SARIF 2.1.0: a run for each model, a result for each finding, whose logical location
    is the module's path, and whose physical one is the class of the module, by ``sources`` of the diagnosis.
    """
    return json.dumps(
        {"$schema": SARIF, "version": "2.1.0", "runs": [_run(one) for one in diagnoses]},
        ensure_ascii=False,
        indent=1,
        allow_nan=False,
    )


def _run(one: Mapping[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys(f["name"] for f in one["findings"]))
    driver = {
        "name": "normlab",
        "version": version("normlab"),
        "rules": [{"id": name} for name in names],
    }
    return {"tool": {"driver": driver}, "results": [_result(f, names, one) for f in one["findings"]]}


def _result(found: Mapping[str, Any], names: Sequence[str], one: Mapping[str, Any]) -> dict[str, Any]:
    said = "; ".join(filter(None, (found["sentence"], found["do"])))
    place: dict[str, Any] = {}
    if found["module"]:
        place["logicalLocations"] = [{"fullyQualifiedName": found["module"], "kind": "module"}]
    if source := one.get("sources", {}).get(found["module"]):
        artifact, region = {"uri": source["file"]}, {"startLine": source["line"]}
        place["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    return {
        "ruleId": found["name"],
        "ruleIndex": names.index(found["name"]),
        "level": LEVELS[found["severity"]],
        "message": {"text": said},
        **({"locations": [place]} if place else {}),
    }
