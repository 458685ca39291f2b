"""Judge kept comparisons anew from their run folders: ``python tools/judge_comparisons.py results/gl-en
results/gl-en-low``.

Outcomes, scores and conclusions are read and computed again, and the pages written anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from normlab.base.files import write_text_atomic
from normlab.base.io import from_json, to_json
from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import Comparison
from normlab.report.compare import compare_page


def judge_again(folder: Path) -> Comparison:
    """Write the conclusions of a folder's comparison, whose runs lie there too, and its page."""
    file = folder / "comparison.json"
    judged = judge(from_json(Comparison, file.read_text(encoding="utf-8")), folder)
    write_text_atomic(file, to_json(judged))
    write_text_atomic(file.with_suffix(".html"), compare_page(judged, folder).html())
    return judged


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "name the folders of the comparisons: tools/judge_comparisons.py results/gl-en results/gl-en-low"
        )
    for given in sys.argv[1:]:
        for sentence in judge_again(Path(given)).sentences:
            print(f"{given}: {sentence}")
