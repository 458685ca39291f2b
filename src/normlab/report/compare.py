"""The page of a comparison: who won, pictures, tables, samples, every run's exact configuration, method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from markupsafe import Markup

from normlab.figures.downsample import POINTS
from normlab.report import tables
from normlab.report.page import (
    Block,
    Cell,
    Code,
    Details,
    Html,
    Page,
    Section,
    Table,
    Text,
    swatch,
)
from normlab.report.pictures import pictures
from normlab.report.runs import RunView, run_details, settings_table, shared, tag, view
from normlab.report.words import (
    breakable,
    difference,
    headline,
    interval,
    lead,
    notes,
    ranking,
    signed,
    slug,
)
from normlab.spec.comparison import Comparison, RecipeResult, Sample
from normlab.spec.units import count, duration, p_value, rate
from normlab.store.folder import write_text_atomic

CHOICE: Final = (
    "Each recipe was trained with the first seed at every learning rate; of the rates at which it trained, "
    "the one that did best on dev was chosen, and the other seeds were run at that one."
)

TEST_IS_APART: Final = "The test text played no part in any choice."

TEST_IS_DEV: Final = (
    "No test text was given: dev serves as both. What is called test here was measured on the text on which "
    "learning rates and checkpoints were chosen, and so flatters every recipe."
)

METHOD: Final = (
    (
        "Test BLEU is the mean over the seeds whose runs ended. Its 95% interval counts two kinds of "
        "chance: sentences are drawn again with replacement (bootstrap), and the spread over seeds that "
        "sentences do not explain is added, by Student's t, because a few seeds know their own spread badly."
    ),
    (
        "A difference is computed on the same draws of sentences for both recipes (paired bootstrap), with "
        "the seeds' spread of both. p is two-sided and corrected for the number of pairs by Holm's "
        "method; significant means below 0.05. Where “exchanged” stands, translations of the same sentence "
        "were exchanged between the two at random (approximate randomisation): what that says holds for the "
        "trained models, not for other seeds of their recipes."
    ),
    (
        "A run is stuck if its training loss never gets clearly below what token frequencies alone give, "
        "their entropy, or ends back there; it diverged if its loss or gradient is not finite or its loss "
        "stays clearly above where it began. It is stopped as soon as that is beyond doubt, and shown as "
        "what it is; none is left out of a table or a picture."
    ),
    (
        "Tokenised BLEU splits the raw text at punctuation and symbols (tok:intl) and smooths nothing. That "
        "is not the Moses tokeniser of multi-bleu.perl: scores in papers are near it, not equal to it."
    ),
    (
        f"Curves have at most {POINTS} points a line: the mean of each stretch of steps, which smooths "
        "them a little. The tables in full are the CSV files in the folder beside this page."
    ),
)

SAMPLES_OPEN: Final = 6
"""Samples that are shown without asking."""


def compare_page(comparison: Comparison, runs_root: Path) -> str:
    """The comparison as one self-contained HTML page; curves are read from ``runs_root/<id>``.

    A run folder that is missing or damaged does not stop the page: it says which, and goes on.
    """
    return _page(comparison, runs_root).html()


def write_compare_page(comparison: Comparison, runs_root: Path, path: Path) -> Path:
    """Write the page to ``path`` and each figure's full table to ``<path's stem>-figures/<figure>.csv``."""
    page = _page(comparison, runs_root)
    folder = path.with_name(f"{path.stem}-figures")
    folder.mkdir(parents=True, exist_ok=True)
    for chart in page.charts():
        if chart.table is not None:
            write_text_atomic(folder / f"{chart.name}.csv", chart.table.write_csv())
    write_text_atomic(path, page.html())
    return path


def _page(comparison: Comparison, root: Path) -> Page:
    views = {run: view(root, run) for run in tables.all_runs(comparison)}
    missing = [run for run, seen in views.items() if seen.problem]
    stale = [run for run, seen in views.items() if seen.stale]
    warning = Markup(' <span class="alarm">{}</span>').format(TEST_IS_DEV) if comparison.test_is_dev else ""
    return Page(
        title=comparison.title,
        headline=headline(comparison),
        facts=_facts(comparison, views),
        lead=lead(comparison) + warning,
        recipes=[r.name for r in comparison.recipes],
        blocks=[
            *pictures(comparison, views, notes(comparison, missing, stale)),
            _results(comparison),
            *_significance(comparison),
            *_samples(comparison),
            _runs(comparison, views, root),
            _method(comparison),
        ],
    )


def _facts(comparison: Comparison, views: Mapping[str, RunView]) -> list[str]:
    spent = sum(r.total_seconds for r in comparison.recipes)
    return [
        comparison.date,
        count(len(comparison.recipes), "recipe"),
        count(len(comparison.lrs), "learning rate"),
        count(len(comparison.seeds), "seed"),
        f"{count(len(views), 'run')}, {duration(spent)} of training",
        comparison.machine,
    ]


def _results(comparison: Comparison) -> Section:
    header = (
        "recipe",
        "test BLEU",
        "chrF",
        "tokenised BLEU",
        "dev BLEU",
        "learning rate",
        "seeds",
        "one run",
        "all runs",
    )
    order = [r for r, _ in ranking(comparison)]
    order += [r for r in comparison.recipes if r not in order]
    best = {
        "bleu": max((r.bleu.value for r in order if r.bleu), default=None),
        "chrf": max((r.chrf for r in order if r.chrf is not None), default=None),
        "tokenised": max((r.bleu_tokenised for r in order if r.bleu_tokenised is not None), default=None),
        "dev": max((r.dev_bleu for r in order if r.dev_bleu is not None), default=None),
    }
    place = {r.name: i for i, r in enumerate(comparison.recipes)}
    rows = []
    for r in order:
        link = f"#{slug(r.name)}"
        trial = tables.best_trial(r)
        mark = Markup(" ") + tag("forced") if r.forced else Markup("")
        rows.append(
            [
                Cell(swatch(place[r.name]) + breakable(r.name) + mark, r.resolves_to, link, title=r.forced),
                _score(
                    r.bleu.value if r.bleu else None,
                    best["bleu"],
                    link,
                    interval(r.bleu.low, r.bleu.high) if r.bleu else "",
                ),
                _score(r.chrf, best["chrf"], link),
                _score(r.bleu_tokenised, best["tokenised"], link),
                _score(r.dev_bleu, best["dev"], link),
                Cell(rate(r.lr), href=f"#run-{trial.run}" if trial else link),
                Cell(_seed_links(r, comparison.seeds), tables.outcome_note(r.outcomes)),
                Cell(duration(r.train_seconds), href=link),
                Cell(duration(r.total_seconds), href=link),
            ]
        )
    table = Table(header, rows, "Best first. Every number leads to the runs behind it. Small: 95% interval.")
    return Section("Results", [table], "results")


def _score(value: float | None, best: float | None, link: str, small: str = "") -> Cell:
    if value is None:
        return Cell("none", "no run ended", link, "alarm")
    return Cell(f"{value:.1f}", small, link, "best" if value == best else "")


def _seed_links(recipe: RecipeResult, seeds: Sequence[int]) -> Markup:
    form = Markup('<a href="#run-{}" title="run {}: {}">{}{}</a>')
    marks = {"trained": ""}
    parts = [
        form.format(run, run, outcome, seed, marks.get(outcome, " ✕"))
        for run, seed, outcome in zip(recipe.runs, seeds, recipe.outcomes, strict=False)
    ]
    return Markup(", ").join(parts)


def _significance(comparison: Comparison) -> list[Section]:
    seen = {name for d in comparison.differences for name in (d.a, d.b)}
    if not seen:
        return []
    order = [r.name for r, _ in ranking(comparison) if r.name in seen]
    order += [r.name for r in comparison.recipes if r.name in seen and r.name not in order]
    place = {r.name: i for i, r in enumerate(comparison.recipes)}
    rows = []
    for a in order:
        row = [Cell(swatch(place[a]) + breakable(a), href=f"#{slug(a)}")]
        for b in order:
            d = difference(comparison, a, b)
            if a == b or d is None:
                row.append(Cell("·" if a == b else "–", tone="faint"))
                continue
            small = [interval(d.delta.low, d.delta.high, sign=True), p_value(d.p_corrected)]
            if d.p_randomisation is not None:
                small.append(f"exchanged: {p_value(d.p_randomisation)}")
            tone = "faint" if not d.significant else "good" if d.delta.value > 0 else "bad"
            verdict = "significant" if d.significant else "not significant"
            title = f"{a} minus {b}: {signed(d.delta.value, 2)} BLEU, {verdict}; uncorrected {p_value(d.p)}"
            row.append(Cell(signed(d.delta.value), Markup("<br>").join(small), f"#{slug(b)}", tone, title))
        rows.append(row)
    caption = (
        "Row minus column, test BLEU. Coloured: significant at 0.05 after correction. "
        "Small: 95% interval, corrected p."
    )
    if any(d.p_randomisation is not None for d in comparison.differences):
        caption += " “Exchanged”: p of approximate randomisation, of these very models, not corrected."
    table = Table(("", *map(breakable, order)), rows, caption)
    return [Section("Which differences are real?", [table], "significance")]


def _samples(comparison: Comparison) -> list[Section]:
    if not comparison.samples:
        return []
    place = {r.name: i for i, r in enumerate(comparison.recipes)}
    cards = [Html(_sample(sample, place)) for sample in comparison.samples]
    blocks: list[Block] = list(cards[:SAMPLES_OPEN])
    if cards[SAMPLES_OPEN:]:
        blocks.append(Details(f"{count(len(cards) - SAMPLES_OPEN, 'more sentence')}", cards[SAMPLES_OPEN:]))
    intro = "First seed, chosen learning rate. Marked: words that are not in the reference at that place."
    return [Section("Samples, side by side", blocks, "samples", intro)]


def _sample(sample: Sample, place: Mapping[str, int]) -> Markup:
    line = Markup("<dt>{}</dt><dd>{}</dd>")
    given = Markup(
        '<dt>source</dt><dd class="given">{}</dd><dt class="last">reference</dt><dd class="last">{}</dd>'
    )
    outputs = [
        line.format(
            swatch(place[name]) + " " + name if name in place else name, _marked(text, sample.reference)
        )
        for name, text in sample.outputs.items()
    ]
    body = given.format(sample.source, sample.reference) + Markup("").join(outputs)
    return Markup('<div class="sample outputs"><dl>{}</dl></div>').format(body)


def _marked(output: str, reference: str) -> Markup:
    """The output with the words marked that have no counterpart in the reference."""
    if not output.strip():
        return Markup('<span class="tag">empty output</span>')
    said, meant = output.split(), reference.split()
    parts = []
    for kind, a, b, _, _ in SequenceMatcher(None, said, meant, autojunk=False).get_opcodes():
        words = " ".join(said[a:b])
        if words:
            parts.append(Markup.escape(words) if kind == "equal" else Markup("<mark>{}</mark>").format(words))
    return Markup(" ").join(parts)


def _runs(comparison: Comparison, views: Mapping[str, RunView], root: Path) -> Section:
    common = shared(list(views.values())) if len(views) > 1 else {}
    blocks: list[Block] = []
    if common:
        blocks.append(Details("Settings that all runs share", [settings_table(common)]))
    rest = dict.fromkeys(views)
    for r in comparison.recipes:
        ids = [i for i in dict.fromkeys([*(t.run for t in r.trials), *r.runs]) if i in rest]
        inside: list[Block] = [run_details(views[i], root, common) for i in ids]
        if r.explained:
            inside.insert(0, Details("What the recipe resolves to", [settings_table(r.explained)]))
        blocks.append(Section(breakable(r.name), inside, slug(r.name), r.resolves_to, listed=False))
        rest = {i: None for i in rest if i not in ids}
    if rest:
        blocks.append(
            Section("Others", [run_details(views[i], root, common) for i in rest], "runs-other", listed=False)
        )
    return Section("Every run, exactly", blocks, "runs", "The command in a run repeats it.")


def _method(comparison: Comparison) -> Section:
    choice = f"{CHOICE} {TEST_IS_DEV if comparison.test_is_dev else TEST_IS_APART}"
    signatures = {
        "BLEU": comparison.signature,
        "chrF": comparison.signature_chrf,
        "tokenised BLEU": comparison.signature_tokenised,
    }
    blocks: list[Block] = [Text(text) for text in (choice, *METHOD)]
    blocks += [Text(f"sacreBLEU, {name}: {said}", "note") for name, said in signatures.items() if said]
    if comparison.command:
        blocks.append(Code(comparison.command))
    if comparison.data:
        blocks.append(settings_table(comparison.data))
    return Section("How this was measured", blocks, "method")
