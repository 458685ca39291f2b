"""Findings for other programs: JUnit's XML and SARIF, read by the libraries that others read them with."""

import json

import pytest
from junitparser import JUnitXml
from sarif_pydantic import Sarif

from normlab.report.machines import LEVELS, junit, sarif

ODD = 'a <b> & "c" \x00\x1b é \U0001f600'


def finding(severity, **more):
    return {"name": "jump", "severity": severity, "sentence": ODD, "table": "scales", "numbers": {"x": "nan"},
            "module": "h.5.mlp", "do": "mend it", **more}  # fmt: skip


DIAGNOSES = [
    {
        "model": "Gpt",
        "title": ODD,
        "findings": [finding("problem"), finding("warning", module="", name="start"), finding("note")],
        "seconds": {"scales": 0.25, "weights": 0.5},
        "sources": {"h.5.mlp": {"file": "my_package/model.py", "line": 12}, "": {"file": "a.py", "line": 1}},
    },
    {"model": "Bert", "findings": [], "seconds": {"weights": 1.5}},
]


def test_a_test_report_has_a_suite_for_each_model_and_a_failure_for_each_grave_finding():
    suites = list(JUnitXml.fromstring(junit(DIAGNOSES).encode()))
    assert [(s.tests, s.failures, s.errors) for s in suites] == [(4, 2, 0), (1, 0, 0)]
    assert [s.time for s in suites] == [0.75, 1.5]
    failed = [case for case in suites[0] if case.result]
    assert [case.name for case in failed] == ["jump: h.5.mlp", "start: scales"]
    assert failed[0].result[0].message == ODD.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert [case.result[0].type for case in failed] == ["problem", "warning"]


def test_code_scanning_has_a_run_for_each_model_and_a_result_for_each_finding():
    text = sarif(DIAGNOSES)
    report = Sarif.model_validate_json(text)
    first, second = report.runs
    assert [result.level.value for result in first.results] == [
        LEVELS[f["severity"]] for f in DIAGNOSES[0]["findings"]
    ]
    assert [result.rule_id for result in first.results] == ["jump", "start", "jump"]
    assert [rule.id for rule in first.tool.driver.rules] == ["jump", "start"]
    plain = json.loads(text)["runs"][0]["results"][0]
    assert plain["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "h.5.mlp"
    places = [r["locations"][0]["physicalLocation"] for r in json.loads(text)["runs"][0]["results"]]
    assert [p["artifactLocation"]["uri"] for p in places] == [
        "my_package/model.py",
        "a.py",
        "my_package/model.py",
    ]
    assert [p["region"]["startLine"] for p in places] == [12, 1, 12]
    assert second.results == []


@pytest.mark.parametrize("write", [junit, sarif])
def test_nothing_examined_is_a_report_too(write):
    assert write([])
