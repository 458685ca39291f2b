"""Score kept translations again: ``NORMLAB_DATA=... python tools/rescore.py results/multi30k-recipes``.

Where a later version scores otherwise, runs of both cannot be compared: the scores of the text are computed
anew from the kept outputs, with their signatures. What needs the model, such as NLL, stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from os.path import expandvars
from pathlib import Path

from normlab.data.text import read_lines
from normlab.runs import RunFolder
from normlab.runs.files import read_json, write_json_atomic
from normlab.tasks.scores import score


def rescore(root: Path) -> Iterator[str]:
    """Rewrite the scores of the translations below a folder; yield a line for each run that changes."""
    for path in sorted(root.rglob("test.hyp.txt")):
        folder = RunFolder(path.parent)
        data, old = folder.config().data, read_json(folder.scores)
        references = read_lines(Path(expandvars(data.test_tgt)))
        found = score(read_lines(folder.outputs), references, target_lang=data.target_lang)
        new = {**old, **found.values(), "signatures": found.signatures()}
        if new != old:
            write_json_atomic(folder.scores, new)
            yield f"{folder.path}: {', '.join(name for name in new if new[name] != old.get(name))}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name the folders with kept translations: tools/rescore.py results/multi30k-recipes")
    for given in map(Path, sys.argv[1:]):
        for line in rescore(given):
            print(line)
