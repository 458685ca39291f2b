"""Judge every case of cases.json by every tool of adapters/, and keep what each says in results.json.

python benchmarks/faults/run.py --environments FOLDER          # FOLDER/TOOL/bin/python has the tool installed
python benchmarks/faults/run.py --tools torch_audit --only router_gate_detached
python benchmarks/faults/run.py --judge-only                   # the verdicts anew, from what was said

Rows are kept after each case: a run that is stopped goes on where it was, as long as neither the cases nor
the tool's version have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results.json"
HANGS_S = 1800.0
"""Seconds without an answer after which a tool is ended; ``worker.py`` has a limit in the processor's."""

Row = dict[str, Any]
NOTHING: Row = {"findings": [], "error": "", "seconds": 0.0, "wall": 0.0}


def adapters() -> list[str]:
    """Return the names of all adapters, ours first."""
    names = sorted(file.stem for file in (FOLDER / "adapters").glob("[!_]*.py"))
    return sorted(names, key=lambda name: name != "normlab")


def kept_cases() -> dict[str, Row]:
    """Return the cases of cases.json by their names."""
    rows = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in rows}


# --------------------------------------------------------------------------------------------------- running


class Worker:
    """A process of a tool's own, which judges one case at a time."""

    def __init__(self, tool: str, python: Path):
        self.tool, self.python = tool, python
        self.process: subprocess.Popen[bytes] | None = None
        self.about: Row = {}

    def start(self) -> None:
        paths = os.pathsep.join((str(ROOT / "src"), str(FOLDER)))
        self.process = subprocess.Popen(
            [str(self.python), str(FOLDER / "worker.py"), self.tool],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self.about = self.reply() or {}

    def reply(self) -> Row | None:
        """Return the next line as data, or none where the process ends or hangs."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANGS_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.stop()
            return None
        return json.loads(line)

    def judged(self, name: str) -> Row:
        if self.process is None:
            self.start()
        if self.process is None:
            return NOTHING | {"error": "the tool could not be started"}
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        return self.reply() or NOTHING | {"error": "the tool ended its process, or hangs"}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


def last_change(folder: str) -> str:
    """Return the commit that last changed a folder."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", folder]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def fingerprint_of_cases() -> str:
    """Return a fingerprint of the code that builds the cases."""
    lists = ("public2", "public3", "public4")
    files = [file for name in lists for file in (ROOT / "tests/corpus" / name).glob("*.py")]
    code = hashlib.sha256()
    for file in sorted(files):
        if file.name not in ("page.py", "run.py"):
            code.update(file.read_bytes())
    return code.hexdigest()[:12]


def judge(tool: str, python: Path, names: Sequence[str], results: Row) -> Iterator[Row]:
    """Let a tool judge the cases that it has not judged yet, and give each row once it is there."""
    worker = Worker(tool, python)
    worker.start()
    if not worker.about:
        raise SystemExit(f"{tool} could not be started by {python}")
    about = worker.about | {"cases": fingerprint_of_cases()}
    if tool == "normlab":
        about["version"] += f" ({last_change('src')})"
    if results["tools"].get(tool, {}) != about:
        results["rows"] = [row for row in results["rows"] if row["tool"] != tool]
    results["tools"][tool] = about
    known = {row["case"] for row in results["rows"] if row["tool"] == tool}
    try:
        for name in names:
            if name not in known:
                yield {"tool": tool, "case": name} | worker.judged(name)
    finally:
        worker.stop()


# --------------------------------------------------------------------------------------------------- judging


NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(e[-+]?\d+)?%?")


def key(finding: Row) -> tuple[str, str, str]:
    """Return what a finding says without its numbers, which differ between a fault and its twin anyway."""
    return finding["check"], finding["place"], NUMBER.sub("#", finding["message"])


def states_cause(finding: Row, case: Row, tool: Any) -> bool:
    """Whether a finding states what is wrong, by the adapter's rule, and at its place if it tells modules."""
    here = any(fnmatchcase(finding["place"], glob) for glob in case["place"].split("|"))
    causes = {*case["named_by"], f"kind: {case['kind']}"}
    return bool(causes & set(tool.states(finding["check"]))) and (here or not tool.ASKS_PLACE)


def verdict(row: Row, case: Row, twin: Row | None, tool: Any) -> tuple[str, Row | None]:
    """Return "named", "flagged" or "missed" of a fault, "clean" or "false alarm" of others, or "error".

    What is found in the twin as well does not count. With it comes the finding that decides.
    """
    advice = getattr(tool, "ADVICE", ())
    findings = [finding for finding in row["findings"] if finding["check"] not in advice]
    if row["error"] and not findings:
        return "error", None
    if case["role"] != "fault":
        return ("false alarm", findings[0]) if findings else ("clean", None)
    in_twin = {key(finding) for finding in twin["findings"]} if twin else set()
    fresh = [finding for finding in findings if key(finding) not in in_twin]
    naming = [finding for finding in fresh if states_cause(finding, case, tool)]
    if naming:
        return "named", naming[0]
    return ("flagged", fresh[0]) if fresh else ("missed", None)


def add_verdicts(results: Row, cases: Mapping[str, Row]) -> None:
    """Judge all rows, and add how each tool was used; rows of cases that are no longer there are dropped."""
    results["rows"] = [row for row in results["rows"] if row["case"] in cases]
    by_name = {(row["tool"], row["case"]): row for row in results["rows"]}
    for row in results["rows"]:
        twin = by_name.get((row["tool"], f"{row['case']}_twin"))
        tool = import_module(f"adapters.{row['tool']}")
        row["verdict"], row["because"] = verdict(row, cases[row["case"]], twin, tool)
    tools = {name: import_module(f"adapters.{name}") for name in results["tools"]}
    results["how"] = {name: {"package": tool.PACKAGE, "how": tool.HOW} for name, tool in tools.items()}


def reasons() -> dict[str, Row]:
    """Return the adapters of tools that do not apply, with what they are and why."""
    tools = {name: import_module(f"adapters.{name}") for name in adapters()}
    return {
        name: {"package": tool.PACKAGE, "version": tool.VERSION, "reason": tool.DOES_NOT_APPLY}
        for name, tool in tools.items()
        if hasattr(tool, "DOES_NOT_APPLY")
    }


def write(results: Row) -> None:
    """Write results as JSON with one row a line, whole or not at all."""
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in results["rows"])
    about = json.dumps({key: each for key, each in results.items() if key != "rows"}, indent=1)
    text = f'{about[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'
    beside = RESULTS.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(RESULTS)


def main() -> None:
    """Run the tools that are asked for, then judge what all of them said."""
    parser = argparse.ArgumentParser(description="Judge the public cases by several tools.")
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="where FOLDER/TOOL/bin/python is")
    parser.add_argument("--tools", nargs="+", metavar="TOOL", help="these adapters alone")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    parser.add_argument("--judge-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    cases, skipped = kept_cases(), reasons()
    fresh = {"tools": {}, "rows": []}
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else fresh
    chosen = [] if options.judge_only else options.tools or adapters()
    for tool in (name for name in chosen if name not in skipped):
        python = Path(sys.executable)
        if options.environments and (options.environments / tool).exists():
            python = options.environments / tool / "bin" / "python"
        for row in judge(tool, python, options.only or list(cases), results):
            results["rows"].append(row)
            results["date"] = datetime.now(UTC).date().isoformat()
            write(results)
            print(
                tool, row["case"], f"{row['seconds']:.1f} s", len(row["findings"]), row["error"], flush=True
            )
    results["do_not_apply"] = skipped
    add_verdicts(results, cases)
    write(results)


if __name__ == "__main__":
    main()
