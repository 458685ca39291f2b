"""Try the cases of the first half without any check: each trains, and a fault differs from its twin.

python tests/corpus/public3/try_a.py
python tests/corpus/public3/try_a.py mean_of_means mean_of_means_twin
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # where the corpus is, not what is in it

import torch

from corpus.public2.run import try_all
from corpus.public3.case_a import CASES

MODULES = ("faults_a1", "faults_a2", "sound_a")


def main() -> None:
    for module in MODULES:
        import_module(f"corpus.public3.{module}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [CASES[name] for name in sys.argv[1:]] or list(CASES.values())
    if not try_all(cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
