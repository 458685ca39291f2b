"""Try the cases of this list without any check, or judge them by ``normlab.check``.

python tests/corpus/public4/run.py try                 # each trains, and a fault differs from its twin
python tests/corpus/public4/run.py judge --json rows.json
python tests/corpus/public4/run.py judge --only slopes_favour_distance
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # where the corpus is, not what is in it

from corpus.public2.run import main
from corpus.public4.collected import CASES

if __name__ == "__main__":
    main(every=CASES)
