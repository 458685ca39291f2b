"""``normlab papers``: the claims of the papers, and what was measured for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from tyro.conf import Positional, arg

from normlab.cli.options import RUNS, Imports, Switch
from normlab.papers.results import ArtefactStatus, at_other_scales, disagreements, folders, standing
from normlab.papers.trainings import LAPTOP, Scale

if TYPE_CHECKING:
    from rich.console import Console

    from normlab.papers.artefact import Artefact
    from normlab.papers.claim import Claim, Measure

STYLES: Final = {
    "agrees": "green",
    "disagrees": "bold red",
    "undecided": "yellow",
    "stale": "yellow",
    "damaged": "bold red",
}
WIDE: Final = 130
"""Columns of a terminal that has room for what was measured beside what is shown."""


@dataclass(frozen=True)
class PapersCommand:
    """List the papers' tables and figures with the verdict on each, or show everything about one of them."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY")] = ()
    """Artefacts such as liu2020.fig4, or papers: xiong2020, nguyen2019, liu2020, apx; nothing: all."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON."""
    scale: Scale = LAPTOP
    """Size of the trainings whose results are shown: laptop, gpu or paper."""
    runs: Path = RUNS
    """Folder whose papers/ holds the results; the results kept by normlab stand in where there is none."""
    imports: Imports = ()

    def run(self) -> None:
        from normlab.papers import chosen

        standings = standings_of(chosen(self.names or ("all",)), self.runs, self.scale)
        if self.as_json:
            print(json.dumps([_plain(s) for s in standings], ensure_ascii=False, allow_nan=False))
        elif len(standings) == 1:
            _show_one(standings[0], at_other_scales([standings[0].artefact], folders(self.runs), self.scale))
        else:
            _show_all(standings)


def standings_of(artefacts: Iterable[Artefact], runs: Path, scale: Scale = LAPTOP) -> list[ArtefactStatus]:
    """What stands about each artefact: results below ``runs``, else the kept ones."""
    return [standing(artefact, folders(runs), scale) for artefact in artefacts]


def _plain(standing: ArtefactStatus) -> dict[str, Any]:
    """An artefact as plain data for JSON; earlier versions without their tables."""
    from normlab.config.io import to_plain
    from normlab.papers.words import standing_in_words

    artefact, found = standing.artefact, standing.found
    measures = {} if found is None else found.measures
    claims = [
        {
            **to_plain(c),
            "measured": to_plain(measures.get(c.measure)),
            "verdict": c.verdict(measures),
            "runs_to_decide": c.runs_to_decide(measures),
        }
        for c in artefact.claims
    ]
    about = ("id", "paper", "shows", "asserts", "discussion", "study", "version", "date", "reason")
    return {
        **{name: getattr(artefact, name) for name in about},
        "study": artefact.study_name,
        "holds": standing_in_words(standing),
        "published": dict(artefact.published),
        "state": standing.state,
        "claims": claims,
        "earlier": [
            {
                **to_plain(replace(one, found=replace(one.found, tables={}))),
                "verdicts": [c.verdict(one.found.measures) for c in one.claims],
            }
            for one in standing.before
        ],
        "scale": standing.scale,
        "fingerprint": artefact.fingerprint(standing.scale),
        "measured_for": None if found is None else found.fingerprint,
        "seconds": None if found is None else found.seconds,
        "file": None if standing.path is None else str(standing.path),
    }


def _show_all(standings: Sequence[ArtefactStatus]) -> None:
    """Print a row for each artefact, with the scale of its trainings where it has any, and how many claims of
    all of them hold.
    """
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.papers.words import disagreeing, in_short, overall, pace, standing_in_words

    seconds = pace(standings)
    roomy = terminal.console().width >= WIDE
    table = terminal.table(
        "artefact", "scale", "claims that hold", "what it shows", *(("what was measured",) if roomy else ())
    )
    for s in standings:
        short = in_short(s, seconds)
        said = [Text(s.artefact.shows), Text(short)]
        cells = said if roomy else [Text("\n").join(filter(None, said))]
        scale = s.scale if s.scale in s.artefact.trainings else "–"
        hold = Text(standing_in_words(s), STYLES.get(s.state, "dim"))
        table.add_row(Text(s.artefact.id), Text(scale), hold, *cells)
    terminal.write(table, f"{len(standings)} artefacts: {', '.join(overall(standings))}")
    for found in disagreements(standings):
        terminal.write(Text(disagreeing(found)))


def _show_one(standing: ArtefactStatus, others: Sequence[ArtefactStatus]) -> None:
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.papers.words import command, number, resolution, standing_in_words, stood_in

    artefact, console = standing.artefact, terminal.console()
    hold = standing_in_words(standing), STYLES.get(standing.state, "dim")
    console.print(Text.assemble((artefact.id, "bold"), ": ", hold))
    terminal.write(Text(artefact.paper, "dim"), Text(artefact.shows), "")
    table = terminal.table("published", "")
    for name, value in artefact.published.items():
        table.add_row(Text(name), Text(number(value) if isinstance(value, float) else str(value)))
    terminal.write(table, "", Text(f"To decide: {artefact.asserts}"))
    print_verdicts(console, standing)
    if standing.trouble:
        terminal.write(Text(standing.trouble))
    if standing.found is not None and standing.found.stand_in:
        terminal.write(stood_in(standing.found))
    if standing.state == "stale":
        terminal.write("stale: this was measured for another claim; the verdicts above are not valid")
    for said in filter(None, (artefact.discussion, artefact.finding)):
        terminal.write("", Text(said))
    if standing.scale in artefact.trainings:
        how = artefact.trainings[standing.scale].differs, resolution(artefact, standing.scale)
        terminal.write("", Text(f"The {standing.scale} scale: {' '.join(filter(None, how))}"))
    if standing.path is not None:
        terminal.write("", f"result: {standing.path}")
    for other in others:
        terminal.write(
            "", f"at the {other.scale} scale: normlab papers show {artefact.id} --scale {other.scale}"
        )
    terminal.write("", command(artefact, standing.scale) if artefact.study else "No study decides it yet.")


def print_verdicts(console: Console, standing: ArtefactStatus) -> None:
    """Print the claims with their verdicts; for changed ones the reason, and what was found before."""
    from rich.text import Text

    from normlab.papers.words import earlier

    artefact = standing.artefact
    _judge(console, artefact.claims, {} if standing.found is None else standing.found.measures)
    if artefact.version > 1:
        console.print(Text(f"version {artefact.version}, {artefact.date}: {artefact.reason}", "dim"))
    for one in standing.before:
        console.print(Text(earlier(one), "dim"))
        _judge(console, one.claims, one.found.measures)


def _judge(console: Console, claims: Sequence[Claim], measures: Mapping[str, Measure]) -> None:
    """Print a line for each claim: verdict, measure, what is allowed, and why that."""
    from rich.text import Text

    from normlab.papers.words import basis, measured, undecided

    for claim in claims:
        verdict, found = claim.verdict(measures), measured(measures.get(claim.measure))
        said = [
            f"allowed {claim.allowed()}",
            *([f"published {claim.published}"] if claim.published else []),
            *basis(claim, measures),
            *filter(None, [undecided(claim, measures)]),
        ]
        console.print(
            Text.assemble(
                (f"{verdict:<10}", STYLES.get(verdict, "dim")),
                f"{claim.says}: ",
                *([(found, "bold"), ", "] if found else []),
                ("; ".join(said), "dim"),
            )
        )
