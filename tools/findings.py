"""Write the table of findings into the lab book: what several artefacts say, and whether they agree.

    python tools/findings.py

Verdicts are those of the results that are kept in results/papers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from normlab.papers.claim import VERDICTS, Verdict
from papers import standings

BOOK = Path(__file__).resolve().parents[1] / "docs/lab-book/papers.md"
COMMAND = "python tools/findings.py"
MARKS = "<!-- findings -->", "<!-- end of findings -->"
FINDINGS = {
    "a Post-LN of 6 layers fails without warm-up at a rate that stays high": ("nguyen2019.table5 post_[56]",),
    "a Post-LN of 6 layers fails without warm-up at a rate that falls from the first step on": (
        "xiong2020.fig2a fails_without*",
    ),
    "warm-up makes a Post-LN better": (
        "xiong2020.fig2a needs_warmup*",
        "xiong2020.fig2b helps*",
        "xiong2020.simplified needs_warmup*",
        "xiong2020.fig5a needs_warmup",
    ),
    "a Pre-LN needs no warm-up": (
        "xiong2020.fig4ab pre_over_post",
        "xiong2020.footnote1 trains",
        "nguyen2019.table4 no_warmup",
        "nguyen2019.table5 pre_*",
    ),
    "a Pre-LN stands larger rates than a Post-LN": (
        "xiong2020.fig5a pre_more_often",
        "liu2020.fig10 pre",
        "liu2020.fig10 pre_over_post",
    ),
    "a Post-LN under Xavier's weights fails at a large rate with a short warm-up": (
        "nguyen2019.table2 xavier_post*",
    ),
    "a Post-LN of 18 layers fails": ("liu2020.table1 post", "liu2020.warmup trains"),
    "an Admin of 18 layers trains": ("liu2020.table2 trains_18",),
    "a Pre-LN is faster at first, or reaches a Post-LN's best loss sooner": (
        "xiong2020.fig4ab steps_pre_over_post",
        "xiong2020.fig4cd *",
        "xiong2020.fig5a sooner*",
        "nguyen2019.fig1 pre_early",
        "liu2020.fig1_9 pre_faster",
    ),
    "a Post-LN that has converged is better than a Pre-LN": (
        "liu2020.table2 post_6",
        "liu2020.fig1_9 pre_worse",
        "liu2020.fig10 post_over_pre",
        "nguyen2019.table6 post",
    ),
    "on little text a Pre-LN ends better than a Post-LN": (
        "nguyen2019.table3 pre",
        "nguyen2019.fig1 pre_late",
    ),
    "Admin ends better than Pre-LN": (
        "liu2020.table2 admin*",
        "liu2020.fig1_9 admin*",
        "liu2020.fig10 admin_over_pre",
        "liu2020.table4 admin",
    ),
    "FixNorm and ScaleNorm are better than LayerNorm, or as good": (
        "nguyen2019.table3 scalenorm",
        "nguyen2019.table3 together",
        "nguyen2019.fig1 best",
        "nguyen2019.table6 *_scalenorm",
        "nguyen2019.table8 test",
    ),
    "gradients do not vanish in a Post-LN encoder": (
        "liu2020.fig3 post_encoder*",
        "liu2020.theorem1 in_model*",
    ),
    "the gradient of the last layer falls with depth in a Pre-LN alone": ("xiong2020.fig3cd *",),
    "gradients are flat in a Pre-LN": ("xiong2020.fig3ab pre*", "xiong2020.appendixF pre_*"),
    "gradients do not vanish in a Pre-LN": ("liu2020.fig3 pre*", "liu2020.remark1 *"),
    "the output of a Post-LN moves in proportion to its depth": (
        "liu2020.fig4 post_random*",
        "liu2020.theorem2 post*",
    ),
}
"""A finding to the claims that assert it: an artefact, and a pattern of its measures."""


def verdicts(pattern: str) -> Iterator[tuple[str, Verdict]]:
    """The claims that a pattern names, each with its verdict; checks do not count."""
    id_, _, measures = pattern.partition(" ")
    status = standings()[id_]
    measured = status.found.measures if status.found is not None and status.fresh else {}
    for claim in status.artefact.claims:
        if fnmatchcase(claim.measure, measures) and not claim.check:
            yield id_, claim.verdict(measured)


def rows() -> Iterator[tuple[str, dict[str, list[Verdict]]]]:
    """Every finding with the verdicts of each artefact."""
    for finding, patterns in FINDINGS.items():
        found: dict[str, list[Verdict]] = {}
        for pattern in patterns:
            for id_, verdict in verdicts(pattern):
                found.setdefault(id_, []).append(verdict)
        yield finding, found


def table() -> str:
    """The table in Markdown; artefacts that contradict each other are said in the last column."""
    lines = ["| finding | artefacts and their verdicts | together |", "| --- | --- | --- |"]
    for finding, found in rows():
        decided = {v for some in found.values() for v in some if v in ("agrees", "disagrees")}
        together = "they disagree" if len(decided) == 2 else next(iter(decided), "open")
        said = (f"`{id_}` {', '.join(counted(some))}" for id_, some in found.items())
        lines.append(f"| {finding} | {'; '.join(said)} | {together} |")
    return "\n".join(lines)


def counted(some: list[Verdict]) -> list[str]:
    """Each verdict that occurs, with how often where there are several."""
    return [f"{v} {n} of {len(some)}" if len(some) > 1 else v for v in VERDICTS if (n := some.count(v))]


def written(book: str) -> str:
    """The lab book with today's table."""
    first, last = MARKS
    between = re.compile(f"{re.escape(first)}.*{re.escape(last)}", re.DOTALL)
    return between.sub(lambda _: f"{first}\n\n{table()}\n\n{last}", book)


if __name__ == "__main__":
    BOOK.write_text(written(BOOK.read_text(encoding="utf-8")), encoding="utf-8")
