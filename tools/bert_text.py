r"""Write the pre-training text of BERT-base: train.txt and dev.txt of documents that blank lines separate.

    python tools/bert_text.py $NORMLAB_DATA/wikipedia-books \
        hf:wikimedia/wikipedia:20231101.en#train.text=1 hf:rojagtap/bookcorpus#train.text=512

Each text is any that normlab reads, with the number of its lines that make a document: one where a line is an
article, some hundreds where it is a sentence of books that nothing separates. Text is lower-cased, a line of
the output is a sentence, and every 200th document is dev (Xiong et al. 2020, Appendix A.2, arXiv 2002.04745).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from normlab.lab.data.sources import open_lines

EACH: Final = 200
_END: Final = re.compile(r"(?<=[.!?])\s+")


def documents(spec: str) -> Iterator[list[str]]:
    """The sentences of each document of ``TEXT=LINES``."""
    text, _, lines = spec.rpartition("=")
    rows = iter(open_lines(text))
    for some in iter(lambda: list(islice(rows, int(lines))), []):
        sentences = [one for line in some for one in _END.split(line.strip().lower()) if one]
        if sentences:
            yield sentences


def main(folder: str, *specs: str) -> None:
    """Write the two files."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    every = (document for spec in specs for document in documents(spec))
    with (
        (out / "train.txt").open("w", encoding="utf-8") as train,
        (out / "dev.txt").open("w", encoding="utf-8") as dev,
    ):
        for number, sentences in enumerate(every, 1):
            print(*sentences, "", sep="\n", file=train if number % EACH else dev)


if __name__ == "__main__":
    main(*sys.argv[1:])
