"""What the plugin costs a run of pytest that does not use it: with and without it, in turn.

    python benchmarks/pytest_plugin.py --runs 20

Each run of pytest collects one test in a process of its own. What is compared is seconds of the processor,
which a busy machine disturbs less than those of the clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Final

MOST_MS: Final = 20
"""What it may cost."""
PLUGIN: Final = "normlab.pytest_plugin"


def processor_s(folder: Path, *options: str) -> float:
    """Run pytest in a folder and return what it takes of the processor."""
    before = _of_children()
    # plug-ins that are installed are left out, so that this one is there or not as the options say
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure in turn, print medians and quartiles, and end with 1 if the plugin costs too much."""
    parser = argparse.ArgumentParser(description="What an unused plugin costs a run of pytest.")
    parser.add_argument("--runs", type=int, default=20, help="runs of each kind")
    runs = parser.parse_args().runs
    differences = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
        processor_s(folder, "-p", PLUGIN)  # the first run compiles
        for _ in range(runs):
            without = processor_s(folder)
            differences.append(processor_s(folder, "-p", PLUGIN) - without)
    low, middle, high = (1000 * cut for cut in quantiles(differences, n=4))
    print(f"the plugin costs {middle:.1f} ms, in {runs} runs (quartiles {low:.1f} to {high:.1f})")
    if middle > MOST_MS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
