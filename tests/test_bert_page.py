"""The numbers of docs/bert.md are those of Figure 5 of Xiong et al. 2020 as it was measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import fmean

from normlab.lab.comparison.result import has_trained
from normlab.papers.results import KEPT, read_reproduction
from test_quoted import prose

SCORES = {"xiong2020.fig5a": ("nll", "masked_accuracy"), "xiong2020.fig5bc": ("accuracy", "f1")}


def bert_page() -> Iterator[str]:
    """The page's sentences and rows of tables."""
    for id_, names in SCORES.items():
        found = read_reproduction(KEPT / f"{id_}.json")
        ends = {row["cell"]: f" [{row['low']:.2f}, {row['high']:.2f}]" for row in found.tables["cells"]}
        for cell, runs in itertools.groupby(found.tables["runs"], key=lambda row: row["cell"]):
            seeds = [(has_trained(row["outcome"]), *(row[name] for name in names)) for row in runs]
            trained, first, second = (fmean(x for x in c if x is not None) for c in zip(*seeds, strict=True))
            yield f"| {cell} | {trained:.0%} | {first:.2f}{ends[cell]} | {second:.2f} |"
        for cell in ends if id_ == "xiong2020.fig5bc" else ():
            yield f"{cell.split()[0]}: {found.facts[cell].partition('; ')[2]}"


def test_the_page_quotes_what_was_measured():
    written = prose("docs/bert.md")
    assert [sentence for sentence in bert_page() if sentence not in written] == []
