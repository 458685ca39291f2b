"""Write docs/papers/<key>.md: what each paper claims, what was measured, and where the two differ.

    python tools/papers.py

Claims and prose come from normlab.papers, numbers from the results that are kept in results/papers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from normlab.config.units import count
from normlab.papers import ARTEFACTS, PAPERS, Paper
from normlab.papers.claim import Claim, Verdict
from normlab.papers.results import KEPT, ArtefactStatus, standing
from normlab.papers.words import basis, earlier, measured, overall, standing_in_words, undecided

FOLDER = Path(__file__).resolve().parents[1] / "docs/papers"
COMMAND = "python tools/papers.py"
HOW = (
    "A claim is written before its result is measured. Trainings are much smaller than the paper's; "
    "`normlab papers ID` and its page say how they differ. Each interval is for its claim alone, and a share "
    "counts the runs of all its cells and seeds as independent, although cells share their seeds."
)


def written() -> dict[Path, str]:
    """Each page of the documentation with its text."""
    return {FOLDER / f"{paper.key}.md": page(paper) for paper in PAPERS.values()}


def page(paper: Paper) -> str:
    """The page of a paper in Markdown."""
    own = [standing(one, [KEPT]) for one in ARTEFACTS.values() if one.id.partition(".")[0] == paper.key]
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    judged = ", ".join(overall(own))
    parts = [
        f"# {paper.authors}",
        f"{title}. This page is written by `{COMMAND}` from the claims and the results that are kept.",
        "## What it claims",
        paper.about,
        "## What we found",
        f"{count(len(own), 'artefact')}: {judged}. {HOW}",
        table(own),
        "## Where we differ",
        *differences(own),
        "## What is undecided",
        *open_claims(own),
        *changed(own),
    ]
    return "\n\n".join(parts) + "\n"


def table(own: Sequence[ArtefactStatus]) -> str:
    """A row for each artefact."""
    rows = ["| artefact | what it shows | claims that hold |", "| --- | --- | --- |"]
    for s in own:
        name = re.sub(r"(?<=[._])", "<wbr>", s.artefact.id)
        shows = s.artefact.shows.replace("|", "\\|")
        rows.append(f"| <code>{name}</code> | {shows} | {standing_in_words(s)} |")
    return "\n".join(rows)


def differences(own: Sequence[ArtefactStatus]) -> Iterator[str]:
    """Each artefact with a claim that disagrees, and why we think that it does."""
    found = [(s, having(s, "disagrees")) for s in own]
    if not any(claims for _, claims in found):
        yield "Nothing that was measured disagrees with it."
    for s, claims in found:
        if claims:
            why = s.artefact.finding or "We do not know yet why."
            yield "\n".join([f"### `{s.artefact.id}`", "", *(line(s, claim) for claim in claims), "", why])


def open_claims(own: Sequence[ArtefactStatus]) -> Iterator[str]:
    """The claims that are undecided, as a list."""
    lines = [line(s, claim, named=True) for s in own for claim in having(s, "undecided")]
    yield "\n".join(lines) if lines else "Nothing that was measured is undecided."


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


def having(one: ArtefactStatus, verdict: Verdict) -> list[Claim]:
    """The claims of an artefact with a verdict."""
    if one.found is None or not one.fresh:
        return []
    return [claim for claim in one.artefact.claims if claim.verdict(one.found.measures) == verdict]


def line(one: ArtefactStatus, claim: Claim, *, named: bool = False) -> str:
    """A claim with its measure as an item of a list."""
    measures = {} if one.found is None else one.found.measures
    said = [
        f"**{found}**" if (found := measured(measures.get(claim.measure))) else "",
        f"allowed {claim.allowed()}",
        f"published {claim.published}" if claim.published else "",
        *basis(claim, {}),
        undecided(claim, measures),
    ]
    name = f"`{one.artefact.id}`, " if named else ""
    return f"- {name}{claim.says}: {'; '.join(filter(None, said))}."


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
