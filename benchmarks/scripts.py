"""How much longer a script takes to its first step while it is recorded.

Each of the forty scripts of ``tests/setups/scripts`` runs in fresh processes, in turns: alone until its first
optimizer is about to step, and under the recording of ``normlab check`` until there is a setup. Both include
the start of Python and the import of torch, as a user waits for them; the recording goes on to the second
step and proves that the first can be repeated. Seconds are the processor's, of one thread.

    python benchmarks/scripts.py --repeats 5
    python benchmarks/scripts.py --repeats 5 --write    # write benchmarks/results/scripts.json, too
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from forty_scripts import REPEATED, SCRIPTS, UNREPEATABLE, Script, Unrepeatable  # noqa: E402

ALONE = """
import os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
def end(*_):
    sys.stdout.flush()
    os._exit(0)
register_optimizer_step_pre_hook(end)
file, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = file
sys.path.insert(0, os.path.dirname(file))
runpy.run_path(file, run_name="__main__")
"""
"""Ends a script where its first optimizer is about to step."""
RECORDED = """
import os, sys
from normlab.errors import UserError
from normlab.setups.script import setup_from_script
try:
    with setup_from_script(sys.argv[1], sys.argv[2:]):
        pass
except UserError:
    pass
os._exit(0)
"""
"""Records a script and makes a setup of it, which includes the proof that its step can be repeated."""
RESULTS = ROOT / "benchmarks/results/scripts.json"
MOST_TIMES, MOST_SECONDS = 1.3, 2.0


def seconds(code: str, script: Script | Unrepeatable) -> float:
    """The processor's time that a fresh process takes, which other work on the machine changes little."""
    arguments = script.arguments if isinstance(script, Script) else ()
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, str(SCRIPTS / f"{script.name}.py"), *arguments],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    """Print the median times of each script, and whether the recording takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts")
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    scripts = [s for s in [*REPEATED, *UNREPEATABLE] if not asked.only or s.name in asked.only]
    slow, rows = [], []
    print(f"{'script':18} {'alone':>7} {'recorded':>9} {'times':>6} {'more':>7}")
    for script in scripts:
        pairs = [(seconds(ALONE, script), seconds(RECORDED, script)) for _ in range(asked.repeats)]
        alone, recorded = (statistics.median(column) for column in zip(*pairs, strict=True))
        times, more = recorded / alone, recorded - alone
        print(f"{script.name:18} {alone:6.2f}s {recorded:8.2f}s {times:6.2f} {more:6.2f}s", flush=True)
        rows.append({"script": script.name, "alone_s": round(alone, 2), "recorded_s": round(recorded, 2)})
        if times > MOST_TIMES and more > MOST_SECONDS:
            slow.append(script.name)
    factors = [row["recorded_s"] / row["alone_s"] for row in rows]
    seconds_more = [row["recorded_s"] - row["alone_s"] for row in rows]
    for name, values, unit in (("times", factors, ""), ("more", seconds_more, " s")):
        print(f"{name}: median {statistics.median(values):.2f}{unit}, largest {max(values):.2f}{unit}")
    print(
        f"{len(scripts) - len(slow)} of {len(scripts)} take at most {MOST_TIMES} times as long, or "
        f"{MOST_SECONDS:g} s more; the others: {', '.join(slow) or 'none'}"
    )
    if asked.write:
        results = {"repeats": asked.repeats, "scripts": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
