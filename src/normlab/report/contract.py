"""What ``check --json``, also with ``--trace``, and ``judge --json`` print for programs, and exit codes: see
docs/contract.md.

``check.schema.json`` and ``judge.schema.json`` beside this file are their JSON schemas. A change that breaks
a reader raises ``SCHEMA_VERSION``; a new key does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from normlab.report.results.check import CheckResult, Finding

SCHEMA_VERSION: Final = 1
SCHEMA: Final = "check.schema.json"
JUDGE_SCHEMA: Final = "judge.schema.json"
CODES: Final = {"holds": 0, "fails": 3, "undecided": 4}
"""The exit code of each verdict; 2 is wrong input, and 1 an error of normlab's."""
JUDGE_CODES: Final = {"keep": 0, "discard": 3, "undecided": 4, "described": 0}
"""The exit code of each verdict of a judgement; without a baseline it only describes, and decides nothing."""


def exit_code(verdicts: Iterable[str]) -> int:
    """The exit code of a check of several models: a failure counts more than an open question."""
    distinct = {*verdicts}
    for verdict in ("fails", "undecided"):
        if verdict in distinct:
            return CODES[verdict]
    return CODES["holds"]


def document(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Report.to_dict()``, and of a title, command, sources and parameters beside it."""
    result = CheckResult.of(report)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.verdict,
        "exit_code": CODES[result.verdict],
        "judged": result.judged,
        "applicable": result.applicable,
        "command": result.command,
        "title": result.title or result.model,
        "model": result.model,
        "failed": [
            {
                **_finding(result, failure),
                "advice": failure.advice,
                "allowed": result.is_allowed(failure),
                "explains": [
                    {**_finding(result, effect), "advice": effect.advice} for effect in failure.follows
                ],
            }
            for failure in result.failures
        ],
        "held": list(result.holds),
        "skipped": [
            {"property": name, "reason": reason, "applies": name in result.applying}
            for name, reason in result.untestable.items()
        ],
        "unreached_losses": [
            {"number": loss.number, "reason": loss.reason} for loss in result.unreached_losses
        ],
        "notes": [_finding(result, note) for note in result.notes],
        "statements": result.statements,
        "facts": result.facts,
        "seconds": result.seconds,
        "parameters": result.parameters,
    }


def trace_document(traced: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``PropertyTrace.to_plain()``, and of a title and a command beside it."""
    return {"schema_version": SCHEMA_VERSION, "exit_code": CODES[traced["verdict"]], **traced}


def judge_document(judgement: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Judgement.to_dict()`` or ``Decision.to_dict()``."""
    verdict = judgement["verdict"]
    return {"schema_version": SCHEMA_VERSION, "exit_code": JUDGE_CODES[verdict], **judgement}


def ledger_document(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Ledger.to_dict()``."""
    return judge_document({"verdict": "described", **ledger})


def _finding(result: CheckResult, finding: Finding) -> dict[str, Any]:
    source = result.sources.get(finding.module)
    # the class of a library is named below its package, which is not a file here
    if source is not None and (source.is_stand_in or not Path(source.file).is_file()):
        source = None
    return {
        "property": finding.property,
        "module": finding.module,
        "evidence": finding.evidence,
        "file": None if source is None else source.file,
        "line": None if source is None else source.line,
    }


def error_document(message: str, code: int) -> dict[str, Any]:
    """What is printed if nothing could be checked: for wrong input, or an error of normlab's."""
    return {"schema_version": SCHEMA_VERSION, "verdict": "error", "exit_code": code, "error": message}
