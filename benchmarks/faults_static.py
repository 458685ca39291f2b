"""Faults planted in models before their first step, and what a preflight names first; sound models beside.

    python benchmarks/faults_static.py             # print what is named
    python benchmarks/faults_static.py --write     # write benchmarks/results/faults_static.json, too
    python benchmarks/faults_static.py NAME ...    # these alone

A fault counts as named if the cause, the first line of the diagnosis, is about a module in which the fault
may be placed, and says what is wrong where the place alone would not (benchmarks/planted).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normlab.diagnosis import Diagnosis, diagnose
from normlab.diagnosis.plan import Plan, Start
from normlab.diagnosis.rules.finding import consequences
from planted import (
    BATCH,
    FAULTS,
    FIFTH,
    FOURTH,
    HEALTHY,
    KNOWN,
    LOSS,
    OPTIMISER,
    SECOND,
    SEVENTH,
    SIXTH,
    THIRD,
    UNSEEN,
    Case,
    Fault,
)

RESULTS = Path(__file__).resolve().parent / "results/faults_static.json"
LISTS = {
    "known": KNOWN,
    "unseen": UNSEEN,
    "second": SECOND,
    "third": THIRD,
    "fourth": FOURTH,
    "fifth": FIFTH,
    "sixth": SIXTH,
    "seventh": SEVENTH,
}
"""Faults that the rules were written for, and seven lists by authors who had not seen the rules. Each was
examined once as the rules were, and these were extended before the next one.
"""

PLACES = {"first_step": OPTIMISER, "groups": OPTIMISER, "targets": LOSS, "inputs": BATCH}
"""Where a finding from these tables is, which names no module."""


def diagnosed(case: Case, declared: dict[str, Any], preset: str) -> Diagnosis:
    """Examine a case with what its user knows of the training to come."""
    plan = Plan(warmup_steps=case.warmup_steps)
    plan["declared"] = {
        role: Start(std=std) for role, std in declared.items() if role not in Plan.__annotations__
    }
    if case.max_grad_norm is not None:
        plan["max_grad_norm"] = case.max_grad_norm
    for name in ("truncated_at", "tied"):
        if name in declared:
            plan[name] = declared[name]
    return diagnose(case.model, case.batch, loss=case.loss, optimiser=case.optimiser, preset=preset, **plan)


def row_of(fault: Fault, preset: str) -> dict[str, Any]:
    """Plant a fault and judge the first finding."""
    found = diagnosed(fault.case(), dict(fault.declared), preset)
    cause = found.cause
    place = "" if cause is None else cause.module or PLACES.get(cause.table, "")
    named = cause is not None and fault.named_by(place, f"{cause.sentence}; {cause.do}")
    return {
        "fault": fault.name,
        "architecture": fault.architecture,
        "list": next(name for name, faults in LISTS.items() if fault in faults.every),
        "named": named,
        "module": place,
        "finding": "" if cause is None else cause.name,
        "verdict": found.verdict,
    }


def healthy(preset: str) -> Iterator[dict[str, Any]]:
    """Examine the sound models; a row for each, with what was found above a note. A warning that the first
    finding explains is folded under it.
    """
    for one in HEALTHY:
        diagnosis = diagnosed(one.case(), {}, preset)
        folded = [] if diagnosis.cause is None else consequences(diagnosis.findings, diagnosis.cause)
        found = [f for f in diagnosis.at_least("warning") if f not in folded]
        yield {
            "model": one.name,
            "preset": preset,
            "problems": [str(f) for f in found if f.severity == "problem"],
            "warnings": [str(f) for f in found if f.severity == "warning"],
            "folded": [str(f) for f in folded],
        }


def main() -> None:
    """Examine every planted fault and every sound model, and count."""
    parser = argparse.ArgumentParser(description="Faults planted in models before their first step.")
    parser.add_argument("names", nargs="*", help="faults to examine; all, and the sound models, without")
    parser.add_argument("--preset", default="preflight", help="the studies that are made")
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for fault in FAULTS:
        if not args.names or fault.name in args.names:
            rows.append(row_of(fault, args.preset))
            mark = "named " if rows[-1]["named"] else "MISSED"
            print(f"{mark} {fault.architecture:12}{fault.name:32}{rows[-1]['verdict'][:150]}", flush=True)
    presets = () if args.names else (args.preset, "standard")
    sound = [one for preset in presets for one in healthy(preset)]
    for one in sound:
        found = "; ".join(one["problems"] + one["warnings"]) or "nothing found"
        print(f"{one['model']}, {one['preset']}: {found}")
    for name in LISTS:
        some = [row for row in rows if row["list"] == name]
        print(f"{name}: {sum(row['named'] for row in some)} of {len(some)} named")
    for preset in dict.fromkeys(one["preset"] for one in sound):
        some = [one for one in sound if one["preset"] == preset]
        problems, warnings = (sum(len(one[kind]) for one in some) for kind in ("problems", "warnings"))
        print(f"sound, {preset}: {problems} problems and {warnings} warnings in {len(some)} models")
    if args.write:
        kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        found = {"first": kept.get("first", {}), "faults": rows, "sound": sound}
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
