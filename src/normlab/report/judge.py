"""The page of a judgement: what was found, every change by seed, every pair, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from normlab.base.metric import Metric
from normlab.base.units import count, duration
from normlab.report.page import Block, Cell, Chart, Code, Notes, Page, PageTable, Section, Text, capital

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

TONES: Final = {"keep": "good", "discard": "bad", "undecided": "faint", "": ""}
ANSWERS: Final = {
    "better": ("a difference", "good"),
    "equal": ("none that matters", ""),
    "open": ("open", "faint"),
}
METHOD: Final = (
    "Changes are compared at each seed, and the differences averaged. Interval and p come from one t, whose "
    "variance the other pairs moderate, and hold for all pairs at once (Bonferroni). How often a change "
    "trains is compared by Fisher’s exact test. docs/statistics.md has the errors and the power, simulated."
)


def metric_of(judgement: Mapping[str, Any]) -> Metric:
    """The metric of ``Judgement.to_dict()``."""
    name, digits = judgement["metric"], judgement["digits"]
    return Metric(name, name, higher_is_better=judgement["higher_is_better"], digits=digits)


def judgement_page(judgement: Mapping[str, Any]) -> Page:
    """The page of ``Judgement.to_dict()``."""
    metric = metric_of(judgement)
    first, *others = judgement["lines"]
    better = "higher" if metric.higher_is_better else "lower"
    changes = judgement["changes"]
    facts = [
        judgement["source"],
        count(len(changes), "change"),
        count(len(judgement["seeds"]), "seed"),
        f"{metric.label}: {better} is better",
    ]
    if judgement["baseline"]:
        facts.append(f"against {judgement['baseline']}")
    if judgement["margin"]:
        facts.append(f"margin {judgement['margin']:g}")
    return Page(
        title=f"Judgement of {judgement['source']}",
        headline=first.removesuffix("."),  # it may begin with a name that the user has chosen
        facts=facts,
        lead="",
        blocks=list(_sections(judgement, metric, others)),
    )


def _sections(judgement: Mapping[str, Any], metric: Metric, lines: Sequence[str]) -> Iterator[Section]:
    of_pairs = sentences_of_pairs(judgement["differences"])
    notes = [Text(line) for line in lines if line not in of_pairs]
    yield Section("", [_scores_chart(judgement, metric), Notes(notes)], "glance", listed=False)
    yield Section("Changes", [_changes(judgement, metric)], "changes")
    if judgement["differences"]:
        rows = [
            [Cell(word, tone=tone), Cell(d["sentence"], d["trains_sentence"])]
            for d in sorted(judgement["differences"], key=lambda d: not is_pair_of(d, judgement["baseline"]))
            for word, tone in [ANSWERS[d["answer"]]]
        ]
        yield Section(
            "Which differences are real?", [PageTable(("", "answer"), rows, text_columns=2)], "pairs"
        )
    if judgement["failed"]:
        rows = [[Cell(sentence)] for sentence in judgement["failed"]]
        yield Section("Runs without a score", [PageTable(("run",), rows)], "failed")
    method: list[Block] = [Text(METHOD)]
    if judgement["command"]:
        method.append(Code(judgement["command"]))
    yield Section("How this was judged", method, "method")


def is_pair_of(difference: Mapping[str, Any], change: str) -> bool:
    """Whether a change is one of the two that are compared."""
    return change in (difference["a"], difference["b"])


def sentences_of_pairs(differences: Sequence[Mapping[str, Any]]) -> set[str]:
    """The sentences about pairs, as they stand among the lines of a judgement."""
    sentences = {d[key] for d in differences for key in ("sentence", "trains_sentence")} - {""}
    return {f"{sentence}." for sentence in sentences}


def _changes(judgement: Mapping[str, Any], metric: Metric) -> PageTable:
    """A row for each change: its mean with an interval, how often it trained, and the score of each seed."""
    decided = bool(judgement["baseline"])
    seeds = [f"seed {seed}" for seed in judgement["seeds"]]
    header = ["change", *["verdict"] * decided, metric.label, "trained", *seeds]
    rows = []
    for change in judgement["changes"]:
        mean, outcomes, verdict = change["mean"], change["outcomes"], change["verdict"]
        cells = [
            *[Cell(verdict or "baseline", tone=TONES[verdict])] * decided,
            _mean(mean, metric),
            Cell(f"{outcomes.count('trained')} of {len(outcomes) - outcomes.count('missing')}"),
        ]
        for score, outcome, reason in zip(change["scores"], outcomes, change["reasons"], strict=True):
            if score is None:
                cells.append(Cell(outcome, title=reason, tone="faint" if outcome == "missing" else "alarm"))
            else:
                cells.append(Cell(metric.shown(score)))
        rows.append([Cell(change["name"]), *cells])
    caption = "The mean is over the seeds that trained, with its 95% interval."
    return PageTable(header, rows, caption, text_columns=1 + decided)


def _mean(mean: Mapping[str, Any] | None, metric: Metric) -> Cell:
    if mean is None:
        return Cell("–", tone="faint")
    return Cell(metric.shown(mean["value"]), between(mean, metric))


def between(interval: Mapping[str, Any], metric: Metric) -> str:
    """The ends of an interval, ``3.19 to 3.24``; empty if it has none."""
    if interval["low"] is None:
        return ""
    return f"{metric.shown(interval['low'])} to {metric.shown(interval['high'])}"


def _scores_chart(judgement: Mapping[str, Any], metric: Metric) -> Chart:
    """The score of each seed, a row of points for each change."""
    rows = [
        {"change": change["name"], "seed": seed, metric.label: score}
        for change in judgement["changes"]
        for seed, score in zip(judgement["seeds"], change["scores"], strict=True)
        if score is not None
    ]

    def draw(_: int) -> Drawn:
        from normlab.report.charts.judge import scores_by_change

        return scores_by_change(rows, [change["name"] for change in judgement["changes"]], metric.label)

    caption = "A point for each run; a line joins the runs of one seed."
    return Chart("scores", "Scores by change and seed", caption, draw, rows)


# ------------------------------------------------------------------------------------- one change, run by us

SEQUENTIAL: Final = (
    "After each seed from the third on, the gain is tested by a paired t test whose critical values make up "
    "for the looks: the chance to keep a change without a gain is at most the level, however often it is "
    "looked at (Lan and DeMets 1983; Jennison and Turnbull 1991). docs/statistics.md has errors and power."
)


def experiment_page(experiment: Mapping[str, Any]) -> Page:
    """The page of ``Experiment.to_dict()``."""
    metric = Metric(
        "score", "score", higher_is_better=experiment["higher_is_better"], digits=experiment["digits"]
    )
    first, *others = experiment["lines"]
    better = "higher" if metric.higher_is_better else "lower"
    rows = experiment["rows"]
    notes = Notes([Text(line) for line in others])
    method: list[Block] = [Text(SEQUENTIAL)]
    if experiment["command"]:
        method.append(Code(experiment["command"]))
    return Page(
        title=f"Judgement of {experiment['candidate']['text']}",
        headline=capital(first.removesuffix(".")),
        facts=[count(len(rows), "seed"), f"score: {better} is better", f"margin {experiment['margin']:g}"],
        lead="",
        blocks=[
            Section("", [_gains_chart(rows, metric), notes], "glance", listed=False),
            Section("Every run", [_runs(rows, metric)], "runs"),
            Section("The two commands", list(_commands(experiment)), "commands"),
            Section("How this was judged", method, "method"),
        ],
    )


def _commands(experiment: Mapping[str, Any]) -> Iterator[Block]:
    """Each command, and the digests of the files that it depends on."""
    for side in ("baseline", "candidate"):
        command = experiment[side]
        yield Text(f"{side.capitalize()}, in {experiment['source']}/{command['id']}:")
        yield Code(command["text"])
        if command["files"]:
            rows = [[Cell(path), Cell(digest)] for path, digest in command["files"].items()]
            yield PageTable(("file", "SHA-256"), rows, text_columns=2)


def gain_of(row: Mapping[str, Any], metric: Metric) -> float | None:
    """By how much the change is better at one seed; None if one of the two runs has no score."""
    baseline, candidate = row["baseline"]["score"], row["candidate"]["score"]
    if baseline is None or candidate is None:
        return None
    return candidate - baseline if metric.higher_is_better else baseline - candidate


def _runs(rows: Sequence[Mapping[str, Any]], metric: Metric) -> PageTable:
    table = []
    for row in rows:
        gain = gain_of(row, metric)
        cells = [_run(row[side], metric) for side in ("baseline", "candidate")]
        table.append([Cell(str(row["seed"])), *cells, Cell("–" if gain is None else metric.signed(gain))])
    return PageTable(
        ("seed", "baseline", "candidate", "gain"), table, "A positive gain is a better candidate."
    )


def _run(run: Mapping[str, Any], metric: Metric) -> Cell:
    if run["score"] is None:
        return Cell(run["outcome"], run["reason"], tone="alarm")
    return Cell(metric.shown(run["score"]), duration(run["seconds"]))


def _gains_chart(rows: Sequence[Mapping[str, Any]], metric: Metric) -> Chart:
    """The gain of each seed, and the mean of the gains so far."""
    points: list[dict[str, Any]] = []
    gains: list[float] = []
    for row in rows:
        gain = gain_of(row, metric)
        if gain is not None:
            gains.append(gain)
            points.append({"seed": row["seed"], "gain": gain, "mean so far": sum(gains) / len(gains)})

    def draw(_: int) -> Drawn:
        from normlab.report.charts.judge import gains_by_seed

        return gains_by_seed(points)

    caption = "A point for each seed, the line is their mean so far."
    return Chart("gains", "Gain by seed", caption, draw, points)


# ----------------------------------------------------------------------------------------------- the ledger

RULE: Final = (
    "Each proposal is judged at a level of its own (LORD++, Ramdas et al. 2017): the levels of proposals "
    "without effect add up to at most 5%, and every keep after the first earns as much again, so that of all "
    "that is kept at most 5% are luck in the mean. A kept change is measured again on fresh seeds: it was "
    "kept because its gain looked large, so what was seen of it is too large in the mean."
)


def ledger_metric(ledger: Mapping[str, Any]) -> Metric:
    """The score of ``Ledger.to_dict()``."""
    higher_is_better = ledger["score"]["higher_is_better"]
    return Metric("score", "score", higher_is_better=higher_is_better, digits=ledger["digits"])


def ledger_page(ledger: Mapping[str, Any]) -> Page:
    """The page of ``Ledger.to_dict()``: every proposal, and what was kept, measured again."""
    metric = ledger_metric(ledger)
    first, *others = ledger["lines"]
    rows = []
    for proposal in ledger["proposals"]:
        verdict = proposal["verdict"]
        rows.append(
            [
                Cell(str(proposal["number"]), proposal["text"]),
                Cell(verdict, tone=TONES[verdict]),
                _gain(proposal["gain"], metric),
                _gain(proposal["measured"], metric),
                Cell(str(proposal["seeds"])),
                Cell(f"{proposal['level']:.2g}"),
            ]
        )
    header = ("proposal", "verdict", "gain", "on fresh seeds", "seeds", "level")
    return Page(
        title="Ledger of proposals",
        headline=first.removesuffix("."),
        facts=[],
        lead=" ".join(others),
        blocks=[
            Section("Every proposal", [PageTable(header, rows, text_columns=2)], "proposals"),
            Section("How this was judged", [Text(RULE)], "method"),
        ],
    )


def _gain(gain: Mapping[str, Any] | None, metric: Metric) -> Cell:
    if gain is None:
        return Cell("–", tone="faint")
    if gain["low"] is None:
        return Cell(metric.signed(gain["value"]))
    ends = [metric.signed(gain[end]) for end in ("low", "high")]
    return Cell(metric.signed(gain["value"]), " to ".join(ends))
