"""Findings for other programs: JUnit's XML and SARIF, read by the libraries that others read them with."""

import json

import pytest
from junitparser import JUnitXml
from sarif_pydantic import Sarif

from normlab.report.ci_formats import junit, sarif

ODD = 'a <b> & "c" \x00\x1b é \U0001f600'


def failure(**more):
    return {"property": "causality", "module": "h.5.mlp", "evidence": ODD, "advice": "mend it", "follows": [],
            **more}  # fmt: skip


REPORTS = [
    {
        "model": "Gpt",
        "title": ODD,
        "failures": [
            failure(follows=[failure(property="reach", module="")]),
            failure(property="start", module="", advice=""),
        ],
        "notes": [{"property": "groups", "module": "optimizer", "evidence": ODD}],
        "holds": ["rows", "finite"],
        "untestable": {"meta": ODD},
        "statements": {"causality": "No position sees a later one."},
        "seconds": {"causality": 0.25, "rows": 0.5},
        "sources": {"h.5.mlp": {"file": "my_package/model.py", "line": 12}, "": {"file": "a.py", "line": 1}},
    },
    {"model": "Bert", "failures": [], "notes": [], "holds": ["rows"], "untestable": {}, "statements": {},
     "seconds": {"rows": 1.5}},
]  # fmt: skip


def test_a_test_report_has_a_suite_for_each_model_and_a_case_for_each_answer():
    suites = list(JUnitXml.fromstring(junit(REPORTS).encode()))
    assert [(s.tests, s.failures, s.skipped, s.errors) for s in suites] == [(6, 3, 1, 0), (1, 0, 0, 0)]
    assert [s.time for s in suites] == [0.75, 1.5]
    answered = [case.name for case in suites[0] if case.result]
    assert answered == ["causality: h.5.mlp", "reach: model", "start: model", "meta"]
    first, second, *_ = suites[0]
    assert first.result[0].message == f"{ODD}; mend it".replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert second.result[0].message.endswith("explained by causality at h.5.mlp")


def test_code_scanning_has_a_run_for_each_model_and_a_result_for_each_failure_and_note():
    text = sarif(REPORTS)
    first, second = Sarif.model_validate_json(text).runs
    assert [result.level.value for result in first.results] == ["error", "error", "note"]
    assert [result.rule_id for result in first.results] == ["causality", "start", "groups"]
    assert [rule.id for rule in first.tool.driver.rules] == ["causality", "start", "groups"]
    found = json.loads(text)["runs"][0]["results"]
    assert found[0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "h.5.mlp"
    places = [r["locations"][0]["physicalLocation"] for r in found[:2]]
    assert [p["artifactLocation"]["uri"] for p in places] == ["my_package/model.py", "a.py"]
    assert [p["region"]["startLine"] for p in places] == [12, 1]
    assert second.results == []


def test_an_allowed_failure_is_skipped_in_a_test_report_and_suppressed_in_code_scanning():
    allowed = [{**REPORTS[0], "allowed": ["causality"]}]
    (suite,) = JUnitXml.fromstring(junit(allowed).encode())
    assert (suite.failures, suite.skipped) == (1, 2)
    results = json.loads(sarif(allowed))["runs"][0]["results"]
    assert [one["ruleId"] for one in results if "suppressions" in one] == ["causality"]


@pytest.mark.parametrize("write", [junit, sarif])
def test_nothing_examined_is_a_report_too(write):
    assert write([])
