"""`normlab check` on public training scripts as they are, and with one planted edit each.

    python benchmarks/scripts/run.py --checkout nanoGPT=FOLDER drivers=benchmarks/scripts/drivers
    python benchmarks/scripts/run.py --checkout nanoGPT=FOLDER --edits  # with each edit of edits.toml
    python benchmarks/scripts/run.py --table                            # results.json as a table
    python benchmarks/scripts/run.py --write                            # and in docs/scripts-tried.md

A script runs in a copy of its checkout, so that the checkout stays as it is. Scripts whose checkout is not
given are left out. Answers are added to --results, in place of older ones of the same script and edit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where documents.py is
from documents import with_tables

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs/scripts-tried.md"
UNCHANGED = "unchanged"
Entry = dict[str, Any]
PLANTED_LATER: Entry = {"first": "–", "mended": "–", "failures": []}
"""What the first runs said of an edit that came after them."""


def planted(folder: Path, edit: Entry) -> None:
    """Replace the edit's old text, which must begin on its line, by the new one."""
    path = folder / edit["file"]
    lines = path.read_text().splitlines(keepends=True)
    before = "".join(lines[: edit["line"] - 1])
    after = "".join(lines[edit["line"] - 1 :])
    old, new = edit["old"].strip("\n"), edit["new"].strip("\n")
    if old not in after or "\n" in after[: after.index(old)]:
        raise SystemExit(
            f"{edit['file']}:{edit['line']} does not hold {old!r}; edits.toml is for another version"
        )
    path.write_text(before + after.replace(old, new, 1))


def checked(script: Entry, checkout: Path, edit: Entry | None, budget: float) -> Entry:
    """What `normlab check` answers about the script, with the edit if there is one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / checkout.name
        shutil.copytree(checkout, folder, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        if edit:
            planted(folder, edit)
        arguments = script["command"]
        split = arguments.index("--") if "--" in arguments else len(arguments)
        command = [*arguments[:split], "--json", "--budget-s", str(budget), *arguments[split:]]
        began, spent = time.perf_counter(), processor_seconds()
        process = subprocess.run(
            [sys.executable, "-m", "normlab", "check", *command],
            cwd=folder,
            env={**os.environ, **script.get("environment", {})},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
    answer: Entry = {"script": script["name"], "edit": edit["change"] if edit else UNCHANGED}
    answer |= {"seconds": round(seconds, 1), "processor_s": round(processor_seconds() - spent, 1)}
    answer["exit"] = process.returncode
    try:
        report = json.loads(process.stdout)
    except json.JSONDecodeError:
        return answer | {"answer": "no report", "said": (process.stdout + process.stderr)[-1500:]}
    if report["verdict"] == "error":
        return answer | {"answer": "no report", "said": report["error"]}
    failures = [{"property": f["property"], "where": str(f)[:600]} for f in report["failed"]]
    untestable = {skipped["property"]: skipped["reason"] for skipped in report["skipped"]}
    answer |= {"failures": failures, "holds": len(report["held"]), "untestable": untestable}
    answer["notes"] = [str(note)[:300] for note in report["notes"]]
    return answer | {"answer": verdict(failures, edit)}


def processor_seconds() -> float:
    """What the commands so far have taken of processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(failures: list[Entry], edit: Entry | None) -> str:
    """How well the failures name the edit; for an unchanged script, whether there are any."""
    failed = [failure["property"] for failure in failures]
    if not edit:
        return "fails" if failed else "holds"
    if not failed:
        return "missed"
    if failed[0] in edit["names"]:
        return "named first"
    return "named" if set(failed) & set(edit["names"]) else "flagged"


def table(answers: list[Entry]) -> str:
    """The answers as a Markdown table."""
    rows = ["| script | edit | answer | failures | holds | not tested | seconds |", "| --- " * 7 + "|"]
    for answer in answers:
        failed = ", ".join(failure["property"] for failure in answer.get("failures", ()))
        counts = f"{answer.get('holds', '')} | {len(answer.get('untestable', ()))}"
        cells = f"{answer['script']} | {answer['edit']} | {answer['answer']} | {failed} | {counts}"
        rows.append(f"| {cells} | {answer['seconds']} |")
    return "\n".join(rows)


def as_they_are(scripts: list[Entry], answers: dict[tuple[str, str], Entry]) -> str:
    """The unchanged scripts as the document lists them."""
    rows = [
        "| script | version | arguments of `normlab check` | seconds | of a processor | answer |",
        "| --- " * 6 + "|",
    ]
    for script in scripts:
        answer = answers.get((script["name"], UNCHANGED))
        if answer is None:
            continue
        failed = ", ".join(failure["property"] for failure in answer.get("failures", ()))
        counts = f"{answer.get('holds', 0)} hold, {len(answer.get('untestable', ()))} not tested"
        said = f"fails {failed}; {counts}" if failed else counts if "holds" in answer else answer["answer"]
        version, command = script["source"].partition(", driver")[0], shlex.join(script["command"])
        seconds = f"{answer['seconds']:.0f} | {answer.get('processor_s', '')}"
        rows.append(f"| {script['name']} | {version} | `{command}` | {seconds} | {said} |")
    return "\n".join(rows)


def with_edits(scripts: list[Entry], answers: dict[tuple[str, str], Entry]) -> str:
    """The edits as the document lists them, beside what was said of each in the first runs."""
    known = {(one["script"], one["edit"]): one for one in json.loads((HERE / "earlier.json").read_text())}
    rows = ["| script | edit | first sight | after mending | newest run | failures |", "| --- " * 6 + "|"]
    for script in scripts:
        for edit in script["edit"]:
            key = (script["name"], edit["change"])
            earlier, answer = known.get(key, PLANTED_LATER), answers.get(key)
            failed = earlier["failures"]
            if answer is not None:
                failed = [failure["property"] for failure in answer.get("failures", ())]
            newest = answer["answer"] if answer is not None else "not run again"
            cells = [*key, earlier["first"], earlier["mended"], newest, ", ".join(failed)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Check the scripts that the arguments choose, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="SCRIPT", help="names or their beginnings")
    parser.add_argument("--edits", action="store_true", help="run the edits, not the scripts as they are")
    parser.add_argument("--edit", type=int, help="run only the edit of this number, from 1")
    parser.add_argument("--budget-s", type=float, default=60)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true", help="print the results, run nothing")
    parser.add_argument("--write", action="store_true", help="write them into the document, run nothing")
    options = parser.parse_args()
    folders = {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.checkout)}
    answers: list[Entry] = json.loads(options.results.read_text()) if options.results.exists() else []
    scripts = tomllib.loads((HERE / "edits.toml").read_text())["script"]
    for script in [] if options.table or options.write else scripts:
        wanted = not options.only or script["name"].startswith(tuple(options.only))
        if script["checkout"] not in folders or not wanted:
            continue
        edits = script["edit"] if options.edits or options.edit else [None]
        for edit in edits[options.edit - 1 : options.edit] if options.edit else edits:
            answer = checked(script, folders[script["checkout"]], edit, options.budget_s)
            key = (answer["script"], answer["edit"])
            answers = [other for other in answers if (other["script"], other["edit"]) != key] + [answer]
            options.results.write_text(json.dumps(answers, indent=1) + "\n")
            print(table([answer]).splitlines()[-1], flush=True)
    if options.table:
        print(table(answers))
    if options.write:
        known = {(answer["script"], answer["edit"]): answer for answer in answers}
        tables = {"as they are": as_they_are(scripts, known), "with an edit": with_edits(scripts, known)}
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), tables))


if __name__ == "__main__":
    main()
