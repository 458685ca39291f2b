"""What ``check --json`` and ``judge --json`` print for programs, and their exit codes: see docs/contract.md.

``check.schema.json`` and ``judge.schema.json`` beside this file are their JSON schemas. A change that breaks
a reader raises ``SCHEMA_VERSION``; a new key does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
SCHEMA: Final = "check.schema.json"
JUDGE_SCHEMA: Final = "judge.schema.json"
CODES: Final = {"holds": 0, "fails": 3, "undecided": 4}
"""The exit code of each verdict; 2 is wrong input, and 1 an error of normlab's."""
JUDGE_CODES: Final = {"keep": 0, "discard": 3, "undecided": 4, "described": 0}
"""The same for a judgement, which is described, and decides nothing, if no baseline is named."""


def exit_code(verdicts: Iterable[str]) -> int:
    """The exit code of a check of several models: a failure counts more than an open question."""
    found = {*verdicts}
    return next((CODES[verdict] for verdict in ("fails", "undecided") if verdict in found), CODES["holds"])


def document(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Report.to_dict()``, and of a title, command, sources and parameters beside it."""
    allowed, applies = report["allowed"], {*report["unjudged"]}
    sources = report.get("sources", {})
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": report["verdict"],
        "exit_code": CODES[report["verdict"]],
        "judged": report["judged"],
        "applicable": report["applicable"],
        "command": report.get("command", ""),
        "title": report.get("title", report["model"]),
        "model": report["model"],
        "failed": [
            {
                **_place(one, sources),
                "advice": one["advice"],
                "allowed": one["property"] in allowed,
                "explains": [{**_place(v, sources), "advice": v["advice"]} for v in one["follows"]],
            }
            for one in report["failures"]
        ],
        "held": list(report["holds"]),
        "skipped": [
            {"property": name, "reason": reason, "applies": name in applies}
            for name, reason in report["untestable"].items()
        ],
        "notes": [_place(one, sources) for one in report["notes"]],
        "statements": report["statements"],
        "facts": report["facts"],
        "seconds": report["seconds"],
        "parameters": report.get("parameters", {}),
    }


def judge_document(judgement: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Judgement.to_dict()`` or ``Decision.to_dict()``."""
    verdict = judgement["verdict"]
    return {"schema_version": SCHEMA_VERSION, "exit_code": JUDGE_CODES[verdict], **judgement}


def ledger_document(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of ``Ledger.to_dict()``."""
    return judge_document({"verdict": "described", **ledger})


def _place(found: Mapping[str, Any], sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    source: Mapping[str, Any] = sources.get(found["module"], {})
    # a library's class is named below its package
    if source.get("is_stand_in") or not Path(source.get("file", "")).is_file():
        source = {}
    return {
        "property": found["property"],
        "module": found["module"],
        "evidence": found["evidence"],
        "file": source.get("file"),
        "line": source.get("line"),
    }


def error_document(message: str, code: int) -> dict[str, Any]:
    """What is printed if nothing could be checked: for wrong input, or an error of normlab's."""
    return {"schema_version": SCHEMA_VERSION, "verdict": "error", "exit_code": code, "error": message}
