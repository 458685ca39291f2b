"""The page of a comparison: result, charts, tables, samples, configurations and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from markupsafe import Markup

from normlab.figures.downsample import POINTS
from normlab.report import tables
from normlab.report.page import Block, Cell, Code, Details, Html, Page, Section, Table, Text, swatch
from normlab.report.pictures import pictures
from normlab.report.runs import RunView, run_details, settings_table, shared, tag, view
from normlab.report.words import breakable, difference, headline, interval, lead, notes, ranking, signed, slug
from normlab.spec.arguments import validate_arguments
from normlab.spec.comparison import Comparison, RecipeResult, Sample
from normlab.spec.metric import Metric
from normlab.spec.units import count, duration, p_value, rate
from normlab.store.folder import write_text_atomic

CHOICE: Final = (
    "Each recipe was trained with the first seed at every learning rate; of the rates at which it trained, "
    "the one that did best on dev was chosen, and the other seeds were run at that one."
)

TEST_IS_APART: Final = "The test text played no part in any choice."

METHOD: Final = (
    (
        "A 95% interval includes two kinds of chance: test examples (sentences, documents) are drawn again "
        "with replacement (bootstrap), and the spread over seeds that examples do not explain is added, by "
        "Student's t, because a few seeds tell little about their own spread."
    ),
    (
        "A difference is computed on the same draws of examples for both recipes (paired bootstrap), with "
        "the spread over the seeds of both. p is two-sided and corrected for the number of pairs by Holm's "
        "method; significant means below 0.05. For “exchanged”, the two recipes' outputs for the same "
        "example were exchanged at random (approximate randomisation): this p is about the trained models, "
        "not about other seeds of their recipes."
    ),
    (
        "A run is stuck if its training loss never gets clearly below what token frequencies alone give, "
        "their entropy, or ends back there; it diverged if its loss or gradient is not finite or its loss "
        "stays clearly above its initial value. Such a run is stopped as soon as that is certain; it is "
        "shown in every table and chart."
    ),
    (
        f"Curves have at most {POINTS} points per line, each the mean over a range of steps, which smooths "
        "them a little. The tables in full are the CSV files in the folder beside this page."
    ),
)

SAMPLES_OPEN: Final = 6
"""Samples that are shown without asking."""


@validate_arguments
def compare_page(comparison: Comparison, runs_root: Path) -> str:
    """Return the comparison as one self-contained HTML page; curves are read from ``runs_root/<id>``.

    Run folders that are missing or damaged are named on the page.
    """
    return _page(comparison, runs_root).html()


@validate_arguments
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
    seen = comparison.seen_before
    warning = Markup(' <span class="alarm">{}</span>').format(seen) if seen else ""
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
            _runs(comparison, views),
            _method(comparison),
        ],
    )


def _facts(comparison: Comparison, views: Mapping[str, RunView]) -> list[str]:
    spent = sum(r.total_seconds for r in comparison.recipes)
    return [
        *([comparison.progress] if comparison.progress else []),
        comparison.date,
        count(len(comparison.recipes), "recipe"),
        count(len(comparison.lrs), "learning rate"),
        count(len(comparison.seeds), "seed"),
        f"{count(len(views), 'run')}, {duration(spent)} of training",
        comparison.machine,
    ]


def _ordered(comparison: Comparison) -> list[RecipeResult]:
    """All recipes, the ranked ones first."""
    ranked = [r for r, _ in ranking(comparison)]
    return ranked + [r for r in comparison.recipes if r not in ranked]


def _places(comparison: Comparison) -> dict[str, int]:
    return {r.name: i for i, r in enumerate(comparison.recipes)}


def _results(comparison: Comparison) -> Section:
    metrics, dev = comparison.tested or comparison.metrics[:1], comparison.dev_metric
    first = ("recipe", f"test {metrics[0].label}", f"dev {dev.label}", "learning rate", "seeds")
    header = (*first, *(metric.label for metric in metrics[1:]), "one run", "all runs")
    order, place = _ordered(comparison), _places(comparison)
    tested = {m.name: {r.name: r.value(m) for r in order} for m in metrics}
    validated = {r.name: r.dev.get(dev.name) for r in order}
    rows = []
    for r in order:
        link = f"#{slug(r.name)}"
        trial = next((t for t in r.trials if t.lr == r.lr), None)
        mark = Markup(" ") + tag("forced") if r.forced else Markup("")
        rows.append(
            [
                Cell(swatch(place[r.name]) + breakable(r.name) + mark, r.resolves_to, link, title=r.forced),
                _score(metrics[0], tested[metrics[0].name], r, test=True),
                _score(dev, validated, r, test=False),
                Cell(rate(r.lr), href=f"#run-{trial.run}" if trial else link),
                Cell(_seed_links(r, comparison.seeds), tables.outcome_note(r.outcomes)),
                *(_score(metric, tested[metric.name], r, test=True) for metric in metrics[1:]),
                Cell(duration(r.train_seconds), href=link),
                Cell(duration(r.total_seconds), href=link),
            ]
        )
    table = Table(header, rows, "Best first. Every number links to the runs behind it. Small: 95% interval.")
    return Section("Results", [table], "results")


def _score(metric: Metric, values: Mapping[str, float | None], recipe: RecipeResult, *, test: bool) -> Cell:
    """Return the cell of a recipe's score, emphasised if it is the best; a test score with its interval."""
    value, link = values[recipe.name], f"#{slug(recipe.name)}"
    if value is None:
        return Cell("none", "no run ended", link, "alarm")
    found = recipe.intervals.get(metric.name) if test else None
    best = max(map(metric.merit, values.values()))
    tone = "best" if metric.merit(value) == best else ""
    return Cell(metric.shown(value), interval(found, metric) if found else "", link, tone)


def _seed_links(recipe: RecipeResult, seeds: Sequence[int]) -> Markup:
    form = Markup('<a href="#run-{}" title="run {}: {}">{}{}</a>')
    parts = [
        form.format(run, run, outcome, seed, "" if outcome == "trained" else " ✕")
        for run, seed, outcome in zip(recipe.runs, seeds, recipe.outcomes, strict=False)
    ]
    return Markup(", ").join(parts)


def _significance(comparison: Comparison) -> list[Section]:
    seen = {name for d in comparison.differences for name in (d.a, d.b)}
    if not seen:
        return []
    order, place = [r.name for r in _ordered(comparison) if r.name in seen], _places(comparison)
    metric = comparison.headline
    rows = []
    for a in order:
        row = [Cell(swatch(place[a]) + breakable(a), href=f"#{slug(a)}")]
        for b in order:
            d = difference(comparison, a, b)
            if a == b or d is None:
                row.append(Cell("·" if a == b else "–", tone="faint"))
                continue
            small = [interval(d.delta, metric, sign=True), p_value(d.p_corrected)]
            if d.p_randomisation is not None:
                small.append(f"exchanged: {p_value(d.p_randomisation)}")
            good = "good" if metric.better(d.delta.value, 0.0) else "bad"
            tone = good if d.significant else "faint"
            verdict = "significant" if d.significant else "not significant"
            value = signed(d.delta.value, metric)
            title = f"{a} minus {b}: {value} {metric.label}, {verdict}; uncorrected {p_value(d.p)}"
            row.append(Cell(value, Markup("<br>").join(small), f"#{slug(b)}", tone, title))
        rows.append(row)
    caption = (
        f"Row minus column, test {metric.title}. Coloured: significant at 0.05 after correction. "
        "Small: 95% interval, corrected p."
    )
    if any(d.p_randomisation is not None for d in comparison.differences):
        caption += " “Exchanged”: p of approximate randomisation, of these very models, not corrected."
    table = Table(("", *map(breakable, order)), rows, caption, beside="comparison.json")
    return [Section("Which differences are real?", [table], "significance")]


def _samples(comparison: Comparison) -> list[Section]:
    if not comparison.samples:
        return []
    place = _places(comparison)
    cards = [Html(_sample(sample, place, comparison.sample_labels)) for sample in comparison.samples]
    blocks: list[Block] = list(cards[:SAMPLES_OPEN])
    if cards[SAMPLES_OPEN:]:
        blocks.append(Details(f"{count(len(cards) - SAMPLES_OPEN, 'more sample')}", cards[SAMPLES_OPEN:]))
    intro = "First seed, chosen learning rate."
    if any(sample.reference for sample in comparison.samples):
        intro += f" Marked: words that are not in the {comparison.sample_labels[1]} at that place."
    return [Section("Samples, side by side", blocks, "samples", intro)]


def _sample(sample: Sample, place: Mapping[str, int], labels: tuple[str, str]) -> Markup:
    line = Markup("<dt>{}</dt><dd>{}</dd>")
    given = Markup('<dt>{}</dt><dd class="given">{}</dd>').format(labels[0], sample.source)
    if sample.reference:
        right = Markup('<dt class="last">{}</dt><dd class="last">{}</dd>')
        given += right.format(labels[1], sample.reference)
    outputs = [
        line.format(
            swatch(place[name]) + " " + name if name in place else name, _marked(text, sample.reference)
        )
        for name, text in sample.outputs.items()
    ]
    return Markup('<div class="sample outputs"><dl>{}</dl></div>').format(given + Markup("").join(outputs))


def _marked(output: str, reference: str) -> Markup:
    """Return the output; words without a counterpart in the reference, if there is one, are marked."""
    if not output.strip():
        return Markup('<span class="tag">empty output</span>')
    if not reference:
        return Markup.escape(output)
    said, meant = output.split(), reference.split()
    parts = []
    for kind, a, b, _, _ in SequenceMatcher(None, said, meant, autojunk=False).get_opcodes():
        words = " ".join(said[a:b])
        if words:
            parts.append(Markup.escape(words) if kind == "equal" else Markup("<mark>{}</mark>").format(words))
    return Markup(" ").join(parts)


def _runs(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    common = shared(list(views.values())) if len(views) > 1 else {}
    blocks: list[Block] = []
    if common:
        blocks.append(Details("Settings that all runs share", [settings_table(common)]))
    rest = list(views)
    for r in comparison.recipes:
        ids = [i for i in dict.fromkeys([*(t.run for t in r.trials), *r.runs]) if i in rest]
        inside: list[Block] = [run_details(views[i], common) for i in ids]
        if r.explained:
            inside.insert(
                0,
                Details(
                    "What the recipe resolves to", [settings_table(r.explained)], beside="comparison.json"
                ),
            )
        blocks.append(Section(breakable(r.name), inside, slug(r.name), r.resolves_to, listed=False))
        rest = [i for i in rest if i not in ids]
    if rest:
        others = [run_details(views[i], common) for i in rest]
        blocks.append(Section("Others", others, "runs-other", listed=False))
    return Section("Every run, exactly", blocks, "runs", "The command shown with a run repeats it.")


def _method(comparison: Comparison) -> Section:
    choice = f"{CHOICE} {comparison.seen_before or TEST_IS_APART}"
    metric, labels = comparison.headline, {metric.name: metric.label for metric in comparison.metrics}
    better = "higher" if metric.higher_is_better else "lower"
    scored = (
        f"Recipes are ranked by test {metric.title} ({better} is better), the mean over the seeds whose runs "
        f"ended; learning rates and checkpoints were chosen by dev {comparison.dev_metric.label}."
    )
    blocks: list[Block] = [Text(text) for text in (choice, scored, *METHOD)]
    blocks += [
        Text(f"Signature of {labels.get(name, name)}: {said}", "note")
        for name, said in comparison.signatures.items()
    ]
    if comparison.command:
        blocks.append(Code(comparison.command))
    if comparison.data:
        blocks.append(settings_table(comparison.data))
    return Section("How this was measured", blocks, "method")
