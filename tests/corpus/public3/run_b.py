"""Try the cases of this half without any check: each trains, and a fault differs from its twin.

python tests/corpus/public3/run_b.py
python tests/corpus/public3/run_b.py --only gates_not_zero gates_not_zero_twin
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # where the corpus is, not what is in it

import torch

from corpus.public2.run import try_all
from corpus.public3.case_b import collected


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Try the second half of the third list of public reports.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases of these names alone")
    options = parser.parse_args(given)
    cases = collected()
    if missing := set(options.only) - set(cases):
        parser.error(f"no case is called {', '.join(sorted(missing))}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not try_all([cases[name] for name in options.only] or list(cases.values())):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
