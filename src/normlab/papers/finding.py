"""Findings: sentences of the papers, with what was measured for each and an answer; no torch.

They are data, ``findings/<paper>.toml``. A finding names its evidence: the effect that a regime shows, and
what the sentence expects of its interval. Effects are computed from the results whenever a finding is read.
The answer and its reason are written by hand, and ``faults`` says where they do not follow from the
intervals: every part of a sentence that was measured counts, and what is open is counted beside what is
decided.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from normlab.base.files import read_toml
from normlab.base.io import from_plain
from normlab.errors import UserError, nearest
from normlab.papers import ARTEFACTS
from normlab.papers.effects import EFFECTS, METRICS, NOTHING, UnmeasuredError, names
from normlab.papers.estimate import Estimate
from normlab.papers.regimes import Book, Regime

Answer: TypeAlias = Literal["supported", "partly", "contradicted", "not tested here"]
ANSWERS: Final[tuple[Answer, ...]] = get_args(Answer)
Reading: TypeAlias = Literal["agrees", "contradicts", "open", "waits"]
"""What a piece of evidence says of a finding. ``waits``: runs that were planned are missing, so it does not
count yet, whatever its estimate is.
"""
Hold: TypeAlias = Literal["untuned", "edge", "weak", "claimed", ""]
"""What holds a piece open that its interval would decide; the words are fields of ``Piece`` and ``Evidence``.
"""
LEAST_RUNS: Final = 3
"""A mean over fewer runs decides nothing: two say nothing of their distribution."""
FOLDER: Final = Path(__file__).parent / "findings"
OWN_PAPERS: Final = ("xiong2020", "nguyen2019", "liu2020", "apx", "disputes")
"""The keys of normlab's own files of findings, in their order."""
FILES: Final[list[Path]] = [FOLDER / f"{key}.toml" for key in OWN_PAPERS]
"""The files whose findings are known, those of papers of one's own too."""


@dataclass(frozen=True)
class Expectation:
    """What a sentence expects of an effect's interval: that all of it is on one side, or between bounds."""

    above: float = -math.inf
    below: float = math.inf
    within: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that every interval lies between, or none. Raises UserError."""
        above = [self.above] if self.above != -math.inf else []
        below = [self.below] if self.below != math.inf else []
        ends = [*above, *below, *(self.within or ())]
        kinds = len(above) + len(below) + (self.within is not None)
        if kinds != 1 or not all(map(math.isfinite, ends)):
            given = ", ".join(f"{end:g}" for end in ends) or "none"
            raise UserError(f"one of above, below and within is needed, in finite numbers, got {given}")
        if self.within and self.within[0] >= self.within[1]:
            low, high = self.within
            raise UserError(f"within begins with its lower end, got [{low:g}, {high:g}]")

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends between which the whole interval has to lie."""
        return self.within or (self.above, self.below)

    def reading(self, estimate: Estimate) -> Reading:
        """Return ``agrees`` if the whole interval lies between the bounds, ``contradicts`` if none of it
        does, else ``open``. Fewer than ``LEAST_RUNS`` runs are always open, unless the estimate is a share.
        """
        if math.isnan(estimate.value) or (0 < estimate.runs < LEAST_RUNS and not estimate.share):
            return "open"
        low, high = self.bounds
        if low < estimate.low and estimate.high < high:
            return "agrees"
        return "contradicts" if estimate.high < low or estimate.low > high else "open"

    def in_words(self) -> str:
        """The bounds in words, such as ``above 0`` or ``0.5 to 2``."""
        return self.in_symbols().replace("> ", "above ").replace("< ", "below ")

    def in_symbols(self) -> str:
        """The bounds in symbols, such as ``> 0`` or ``0.5 to 2``."""
        low, high = (f"{end:g}".replace("-", "−") for end in self.bounds)
        if self.within:
            return f"{low} to {high}"
        return f"> {low}" if math.isfinite(self.bounds[0]) else f"< {high}"


@dataclass(frozen=True)
class Piece:
    """An effect that a finding names."""

    says: str
    """What is compared, in a few words."""
    regime: str
    effect: str
    arguments: Mapping[str, Any]
    expects: Expectation
    margin: str = ""
    """Where a bound comes from that is not the value of no difference."""
    fixed: bool = False
    """Whether the bound stands in the ``regime.toml`` that was committed before its runs."""
    weak: str = ""
    """Why its regime is too weak a test to contradict the sentence: where it would, it counts as open."""
    edge: str = ""
    """Which side has the lowest or highest rate tried, if the regime keeps no sweep: it counts as open."""
    claimed: float | None = None
    """The published effect, in the unit of this one, where that is smaller than the bound: it is not
    contradicted by an interval that contains it.
    """
    because: str = ""
    """Why it does not count for the answer; empty if it does."""

    def cells(self) -> set[str]:
        """The cells of its regime that it reads."""
        sides = [self.arguments[side] for side in ("of", "over") if side in self.arguments]
        return {cell for side in sides if not isinstance(side, Mapping) for cell in names(side)}

    @property
    def number(self) -> tuple[str, ...]:
        """What is read of the regime. The two sides of a comparison, exchanged, give the same number, and so
        does an argument that is left to its default.
        """
        given = EFFECTS[self.effect].with_defaults(self.arguments)
        sides = sorted(_side(given.pop(side)) for side in ("of", "over") if side in given)
        return self.regime, self.effect, *sides, *sorted(f"{key} {value}" for key, value in given.items())


def _side(given: Any) -> str:
    """A side of a comparison in words, the same for a cell and for a list of it alone."""
    return repr(given if isinstance(given, Mapping) else sorted(names(given)))


@dataclass(frozen=True)
class Finding:
    """A sentence of a paper, what was measured for it, and the answer."""

    id: str
    short: str
    """The sentence in a few words."""
    says: str
    """The sentence as the paper has it, or nearly."""
    where: str
    """Section, table or figure."""
    published: str
    """What the paper has for it."""
    answer: Answer
    because: str
    """Why this answer, in a sentence."""
    evidence: tuple[Piece, ...]
    left_out: tuple[Piece, ...] = ()
    """Effects that are shown and do not count, each with the reason."""
    artefacts: tuple[str, ...] = ()
    """The tables and figures that show it, by their ids."""
    rest: tuple[str, ...] = ()
    """The findings that have the other parts of its sentence."""
    needs: str = ""
    """The hardware, text or runs that an answer needs; only for one that is not tested here."""
    paper: str = ""
    """The key of its paper."""


@dataclass(frozen=True)
class Evidence:
    """A piece with its regime, what it measures, and what that says of the finding."""

    piece: Piece
    regime: Regime
    estimate: Estimate
    reading: Reading
    missing: int
    """The number of planned runs that are not there yet."""
    untuned: str = ""
    """A cell that loses at a rate at the edge of those tried, to one at another rate; empty if none does."""
    held_open_by: Hold = ""
    """What holds it open although its interval decides."""
    unmeasured: str = ""
    """Why runs that are there give no estimate, such as that one of them keeps no score."""

    @property
    def equal(self) -> float | None:
        """The effect's value of no difference."""
        return EFFECTS[self.piece.effect].equal


@dataclass(frozen=True)
class Reviewed:
    """A finding with its evidence measured."""

    finding: Finding
    evidence: tuple[Evidence, ...]
    left_out: tuple[Evidence, ...]

    @property
    def main(self) -> Evidence | None:
        """The piece that stands for the finding in one line: the first that decides its answer, else the
        first that is there, else the first.
        """
        counting = [piece for piece in self.evidence if piece.reading != "waits"]
        decided = self.finding.answer != "not tested here"
        deciding = [piece for piece in counting if decided and piece.reading != "open"]
        return next(iter((*deciding, *counting, *self.evidence)), None)

    @property
    def counts(self) -> Mapping[Reading, int]:
        """How many pieces say what, those that wait for runs too."""
        return Counter(evidence.reading for evidence in self.evidence)

    @property
    def tested_and_open(self) -> bool:
        """Whether runs are there that leave the sentence open."""
        return self.finding.answer == "not tested here" and self.counts["open"] > 0


def read_findings(file: Path) -> tuple[Finding, ...]:
    """Read the findings of a paper's file, whose name is the paper's key.

    Raises UserError with the finding's id for an entry that it cannot have, and for an unknown table.
    """
    content = read_toml(file)
    for name in content:
        if name not in TABLES:
            raise UserError(f"{file}: unknown table {name!r}{nearest(name, TABLES)}")
    return tuple(_finding(entry, file.stem) for entry in tables_of(content, "finding", str(file)))


def _finding(entry: Mapping[str, Any], paper: str) -> Finding:
    name = str(entry.get("id", "a finding"))
    evidence, left_out = (
        tuple(_piece(piece, name) for piece in tables_of(entry, key, name))
        for key in ("evidence", "left_out")
    )
    # a piece has keys of its own that it does not declare, so it is read apart
    finding: Finding = from_plain(Finding, {**entry, "evidence": [], "left_out": [], "paper": paper}, name)
    return replace(finding, evidence=evidence, left_out=left_out)


def tables_of(content: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """Return the tables of a name, as in ``[[finding]]``; none without one."""
    tables: list[dict[str, Any]] = from_plain(list[dict[str, Any]], content.get(key, []), f"{where}, {key}")
    return tables


TABLES: Final = ("paper", "settings", "regimes", "finding", "exact")
"""What the file of a paper may have."""
BOUNDS: Final = {"above", "below", "within"}
"""The keys of an expectation."""
_WORDS: Final = {"says", "regime", "effect", "margin", "fixed", "weak", "edge", "claimed", "because"}
"""The keys of a piece that are neither bounds nor arguments of its effect."""


def _piece(entry: Mapping[str, Any], finding: str) -> Piece:
    """Read a piece; a key that is neither a word of its own nor a bound is an argument of the effect."""
    for key in ("says", "regime", "effect"):
        if key not in entry:
            raise UserError(f"{finding}: a piece of evidence needs {key}, got {', '.join(entry)}")
    bounds = {key: value for key, value in entry.items() if key in BOUNDS}
    words = {key: value for key, value in entry.items() if key in _WORDS}
    arguments = {key: value for key, value in entry.items() if key not in BOUNDS | _WORDS}
    if len(bounds) != 1:
        given = ", ".join(bounds) or "none"
        raise UserError(f"{finding}: {entry['says']!r} needs one of above, below and within, got {given}")
    piece: Piece = from_plain(Piece, {**words, "arguments": arguments, "expects": bounds}, finding)
    return piece


def reviewed(finding: Finding, book: Book) -> Reviewed:
    """Measure all evidence of a finding, including what is left out.

    Raises UserError with the finding's id where its regime, its effect or its cells do not exist.
    """
    try:
        evidence, left_out = (
            tuple(measured(piece, book) for piece in pieces)
            for pieces in (finding.evidence, finding.left_out)
        )
    except UserError as error:
        raise UserError(f"{finding.id}: {error}") from error
    return Reviewed(finding, evidence, left_out)


def measured(piece: Piece, book: Book) -> Evidence:
    """Measure a piece of evidence, and say how its estimate reads. It is open without an estimate."""
    regime = book.regime(piece.regime)
    unmeasured = ""
    try:
        estimate = EFFECTS[piece.effect](regime, piece.arguments)
    except UnmeasuredError as error:
        estimate, unmeasured = NOTHING, str(error)
    missing = regime.missing(piece.cells())
    untuned = _untuned(piece, regime, estimate)
    reading = piece.expects.reading(estimate)
    held_open_by = _held_open_by(piece, estimate, reading, untuned)
    if held_open_by:
        reading = "open"
    if missing:
        reading, held_open_by = "waits", ""
    return Evidence(piece, regime, estimate, reading, missing, untuned, held_open_by, unmeasured)


def _held_open_by(piece: Piece, estimate: Estimate, reading: Reading, untuned: str) -> Hold:
    """What keeps an interval that decides from counting as decided."""
    if reading == "open":
        return ""
    if untuned:
        return "untuned"
    if piece.edge:
        return "edge"
    if reading == "contradicts" and piece.weak:
        return "weak"
    # a test whose interval contains the effect that is claimed would miss it
    if reading == "contradicts" and piece.claimed is not None:
        return "claimed" if estimate.low <= piece.claimed <= estimate.high else ""
    return ""


def _untuned(piece: Piece, regime: Regime, estimate: Estimate) -> str:
    """The cell that loses a comparison of two rates while its own is at the edge of those that were tried: at
    another rate it might not lose, so the comparison decides nothing. Empty if there is none; where both
    sides have the same rate, the comparison counts as it is.
    """
    effect = EFFECTS[piece.effect]
    given = effect.with_defaults(piece.arguments)
    is_compared = {"of", "over", "metric"} <= given.keys()
    # only the sign of a difference of scores says who loses; that of a share or a ratio does not
    if not is_compared or effect.equal != 0 or math.isnan(estimate.value):
        return ""
    of_wins = (estimate.value > 0) == METRICS[given["metric"]].higher_is_better
    losers, winners = (given["over"], given["of"]) if of_wins else (given["of"], given["over"])
    others = {regime.rates[cell].value for cell in names(winners) if cell in regime.rates}
    for cell in names(losers):
        rate = regime.rates.get(cell)
        if rate and rate.at_the_edge and others - {rate.value}:
            return cell
    return ""


def faults(review: Reviewed) -> list[str]:
    """Say where the answer does not follow from the intervals, and what is not said of the evidence."""
    finding = review.finding
    sentences: list[str] = []
    follows = answer_of(review.counts)
    if finding.answer != follows:
        readings = [evidence.reading for evidence in review.evidence]
        sentences.append(f"its answer is {finding.answer!r}, and its intervals say {follows!r}: {readings}")
    if (finding.answer == "not tested here") != bool(finding.needs):
        sentences.append("a finding says what it needs exactly if it is not tested here")
    numbers = Counter(piece.number for piece in (*finding.evidence, *finding.left_out))
    for number, times in numbers.items():
        if times > 1:
            sentences.append(f"one number is read against more than one expectation: {', '.join(number)}")
    sentences += _counted_twice(review.evidence)
    for evidence in (*review.evidence, *review.left_out):
        sentences += _unsaid(evidence)
    for piece in finding.left_out:
        if not piece.because:
            sentences.append(f"{piece.says!r} is left out without a reason")
    for piece in finding.evidence:
        if piece.because:
            sentences.append(f"{piece.says!r} counts, so it needs no reason to be left out")
    return sentences


def answer_of(counts: Mapping[Reading, int]) -> Answer:
    """The answer that follows from what the evidence says.

    Pieces that agree and pieces that contradict make *partly*, whatever else is open. Pieces that all say the
    same decide unless more pieces are open than decided: then too much of the sentence is unknown.
    """
    agree, contradict, open_ = (counts.get(reading, 0) for reading in ("agrees", "contradicts", "open"))
    if agree and contradict:
        return "partly"
    if agree + contradict == 0 or open_ > agree + contradict:
        return "not tested here"
    return "supported" if agree else "contradicted"


def _counted_twice(evidence: Iterable[Evidence]) -> Iterator[str]:
    """Pieces of two regimes that both count, the runs of one among those of the other: a regime that more
    seeds were added to under another name.
    """
    counting = [piece for piece in evidence if piece.reading != "waits"]
    for fewer, more in permutations(counting, 2):
        same_effect = fewer.piece.effect == more.piece.effect
        if not same_effect or fewer.piece.regime == more.piece.regime:
            continue
        runs = _runs_of(fewer)
        if runs and runs <= _runs_of(more):
            yield f"the runs of {fewer.piece.says!r} count again in {more.piece.says!r}; leave the former out"


def _runs_of(evidence: Evidence) -> set[str]:
    """The ids of the runs that a piece reads."""
    cells = evidence.piece.cells()
    return {run.id for run in evidence.regime.runs if run.cell in cells}


def _unsaid(evidence: Evidence) -> Iterator[str]:
    """What has to be said of the bound of a piece, and is not."""
    piece = evidence.piece
    if _bound_of_ours(piece) and not piece.margin:
        yield f"{piece.says!r} expects {piece.expects.in_words()} without saying where that is from"
    if piece.fixed and not _is_fixed(evidence):
        yield f"{piece.says!r} has a bound that no regime.toml fixed before the runs of {piece.regime}"


def _is_fixed(evidence: Evidence) -> bool:
    """Whether a bound is the margin of the regime, to one side or to both."""
    metric = EFFECTS[evidence.piece.effect].with_defaults(evidence.piece.arguments).get("metric")
    margin = evidence.regime.margins.get(str(metric))
    return {abs(end) for end in evidence.piece.expects.bounds if math.isfinite(end)} == {margin}


def _bound_of_ours(piece: Piece) -> bool:
    """Whether a bound is not the value at which the effect shows no difference."""
    ends = [end for end in piece.expects.bounds if math.isfinite(end)]
    return ends != [EFFECTS[piece.effect].equal]


def known_findings() -> dict[str, Finding]:
    """Return all known findings by id, paper by paper.

    Raises UserError for an id that two papers have, and for an artefact or a finding that does not exist.
    """
    findings: dict[str, Finding] = {}
    for file in FILES:
        for finding in read_findings(file):
            if finding.id in findings:
                raise UserError(f"{file}: the id {finding.id} is taken; give yours another one")
            findings[finding.id] = finding
    for finding in findings.values():
        _refuse_unknown(finding.artefacts, ARTEFACTS, f"{finding.id}: artefacts names")
        _refuse_unknown(finding.rest, findings, f"{finding.id}: rest names")
    return findings


def _refuse_unknown(named: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in named:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), 1)
            hint = f"did you mean {close[0]}?" if close else "normlab papers lists all"
            raise UserError(f"{where} {name!r}, which does not exist; {hint}")
