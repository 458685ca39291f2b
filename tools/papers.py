"""Write docs/papers/<key>.md: what each paper claims, what was measured, and where the two differ.

    python tools/papers.py

Claims and prose come from normlab.papers, numbers from the results that are kept in results/papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from normlab.config.units import count
from normlab.papers import ARTEFACTS, PAPERS, Paper
from normlab.papers.artefact import Tally
from normlab.papers.claim import Claim, Measure
from normlab.papers.results import KEPT, ArtefactStatus, standing
from normlab.papers.words import basis, earlier, measured, standing_in_words, undecided

FOLDER = Path(__file__).resolve().parents[1] / "docs/papers"
COMMAND = "python tools/papers.py"
HOW = (
    "A claim is written before its result is measured. Trainings are much smaller than the paper's; "
    "`normlab papers ID` and its page say how they differ. Each interval is for its claim alone, and a share "
    "counts the runs of all its cells and seeds as independent, although cells share their seeds."
)
REGIME = ("text", "model", "network", "training", "batch", "tokens")
"""The facts of a measurement that say on what it was made."""
HEAD = ("claim", "published", "holds if", "measured", "runs", "verdict")
WORDS = {"agrees": "holds", "disagrees": "differs", "undecided": "undecided", "not run": "not run"}


def written() -> dict[Path, str]:
    """Each page of the documentation with its text."""
    return {FOLDER / f"{paper.key}.md": page(paper) for paper in PAPERS.values()}


def page(paper: Paper) -> str:
    """The page of a paper in Markdown."""
    own = [standing(one, [KEPT]) for one in ARTEFACTS.values() if one.id.partition(".")[0] == paper.key]
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    parts = [
        f"# {paper.authors}",
        f"{title}. This page is written by `{COMMAND}` from the claims and the results that are kept.",
        "## What it claims",
        paper.about,
        "## What we found",
        f"{counted(own)} {HOW}",
        *(artefact(one) for one in own),
        *changed(own),
    ]
    return "\n\n".join(parts) + "\n"


def counted(own: Sequence[ArtefactStatus]) -> str:
    """How many claims hold here, do not, and cannot be told; then checks, and what is not measured."""
    judged = [(s, s.found) for s in own if s.found is not None and s.fresh]
    total = sum((found.tally(s.artefact.claims) for s, found in judged), Tally())
    holds, differs, undecided = (total.verdicts.get(v, 0) for v in ("agrees", "disagrees", "undecided"))
    claims = count(holds + differs + undecided, "claim")
    sentences = (
        f"Of {claims}, **{holds} hold here**, **{differs} do not**, and **{undecided} cannot be told on this "
        "machine**."
    )
    if total.checks:
        sentences += f" {total.passed} of {count(total.checks, 'check')} of the measurements pass."
    if waiting := len(own) - len(judged):
        sentences += f" {waiting} of {count(len(own), 'artefact')} are not measured yet."
    return sentences


def artefact(one: ArtefactStatus) -> str:
    """An artefact with its regime and each claim: what is printed, what was measured, by how many runs."""
    own, found = one.artefact, one.found
    parts = [f"### `{own.id.partition('.')[2]}`", own.shows]
    if found is None or not one.fresh:
        return "\n\n".join([*parts, f"{one.state.capitalize()}."])
    regime = [found.facts[name] for name in REGIME if name in found.facts]
    rows = [cells(claim, found.measures) for claim in own.claims]
    if regime:
        parts.append(f"Measured on {', '.join(regime)}.")
    parts.append("\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)))
    costs = (f"- {claim.says}: {undecided(claim, found.measures)}." for claim in own.claims)
    parts.append("\n".join(cost for cost in costs if not cost.endswith(": .")))
    if any(claim.verdict(found.measures) == "disagrees" for claim in own.claims):
        parts.append(own.finding or "We do not know yet why it differs.")
    return "\n\n".join(filter(None, parts))


def cells(claim: Claim, measures: Mapping[str, Measure]) -> list[str]:
    """A claim as a row of a table."""
    measure, verdict = measures.get(claim.measure), claim.verdict(measures)
    word = "passes" if claim.check and verdict == "agrees" else WORDS[verdict]
    runs = str(measure.runs) if measure is not None and measure.runs else "–"
    bounds = "; ".join([claim.allowed(), *basis(claim, {})])
    row = [claim.says, claim.published or "–", bounds, measured(measure) or "–", runs, word]
    return [cell.replace("|", "\\|") for cell in row]


def changed(own: Sequence[ArtefactStatus]) -> Iterator[str]:
    """The artefacts whose claims were written anew, with what was found for the versions before."""
    again = [s for s in own if s.before]
    if again:
        yield "## Claims that were changed"
        yield "A claim that was written anew after a result keeps its earlier versions."
        yield "\n".join(
            f"- `{s.artefact.id}`, version {s.artefact.version}, {s.artefact.date}: {s.artefact.reason} "
            f"{'; '.join(earlier(one) for one in s.before)}; now {standing_in_words(s)}."
            for s in again
        )


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
