"""The page of a comparison: result, charts, tables, samples, configurations and method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from markupsafe import Markup

from normlab.base.files import write_output, write_text_atomic
from normlab.base.io import validated
from normlab.base.metric import Metric, amount
from normlab.base.units import count, duration, p_value, rate
from normlab.lab.comparison.result import Comparison, RecipeResult, Sample, has_trained
from normlab.report.charts.theme import POINTS
from normlab.report.comparison_charts import all_runs, linked, names, notes, pictures, sentence, slug, words
from normlab.report.page import (
    Block,
    Cell,
    Code,
    Details,
    Html,
    Page,
    PageTable,
    Section,
    Text,
    breakable,
    swatch,
)
from normlab.report.runs import RunView, run_details, settings_table, shared, tag, view

ROWS_OPEN: Final = 15
"""So many pairs of recipes are shown without asking."""

SAMPLES_OPEN: Final = 6
"""So many samples are shown without asking."""


@validated
def write_compare_page(comparison: Comparison, runs_root: Path, path: Path) -> Path:
    """Write the page to ``path`` and each figure's full table to ``<path's stem>-figures/<figure>.csv``.

    A device or a pipe gets the page alone.
    """
    page = compare_page(comparison, runs_root)
    if path.is_file() or not path.exists():
        folder = path.resolve().with_name(f"{path.stem}-figures")
        folder.mkdir(parents=True, exist_ok=True)
        for chart in page.charts():
            if chart.csv is not None:
                write_text_atomic(folder / f"{chart.name}.csv", chart.csv())
    write_output(path, page.html())
    return path


def compare_page(comparison: Comparison, root: Path) -> Page:
    """The page of a comparison, with the curves of the runs ``root/<id>``; it names run folders that are
    missing or damaged.
    """
    views = {run: view(root, run) for run in all_runs(comparison)}
    missing = [run for run, seen in views.items() if seen.problem]
    stale = [run for run, seen in views.items() if seen.stale]
    seen = comparison.seen_before
    warning = Markup(' <span class="alarm">{}</span>').format(seen) if seen else ""
    headline, *lead = comparison.sentences
    return Page(
        title=comparison.title,
        headline=linked(comparison, headline),
        facts=_facts(comparison, views),
        lead=Markup(" ").join(sentence(comparison, said) for said in lead) + warning,
        recipes=[r.name for r in comparison.recipes],
        legend="Setups" if comparison.noun == "setup" else "Recipes",
        blocks=[
            *pictures(comparison, views, list(notes(comparison, missing, stale))),
            _results(comparison),
            *_pairs(comparison),
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
        count(len(comparison.recipes), comparison.noun),
        count(len(comparison.lrs), "learning rate"),
        count(len(comparison.seeds), "seed"),
        f"{count(len(views), 'run')}, {duration(spent)} of training",
        comparison.machine,
    ]


def _results(comparison: Comparison) -> Section:
    metrics = comparison.tested or comparison.metrics[:1]
    header = (comparison.noun, f"test {metrics[0].label}", "trained", "learning rate", "seeds")
    counted = ["parameters"] if any(r.cost for r in comparison.recipes) else []
    header += (*(metric.label for metric in metrics[1:]), *counted, "one run", "all runs")
    place = {r.name: i for i, r in enumerate(comparison.recipes)}
    best = {m.name: max((m.sort_key(r.value(m)) for r in comparison.recipes), default=0.0) for m in metrics}
    rows = []
    for r in comparison.ranked:
        link = f"#{slug(r.name)}"
        trial = next((t for t in r.trials if t.lr == r.lr), None)
        mark = Markup(" ") + tag("forced") if r.forced else Markup("")
        first, *others = [_score(metric, r, best[metric.name]) for metric in metrics]
        rows.append(
            [
                Cell(swatch(place[r.name]) + breakable(r.name) + mark, r.resolves_to, link, title=r.forced),
                first,
                _share(r, link),
                Cell(rate(r.lr), href=f"#run-{trial.run}" if trial else link),
                Cell(_seed_links(r, comparison.seeds)),
                *others,
                *[_cost(r, link) for _ in counted],
                Cell(duration(r.train_seconds), href=link),
                Cell(duration(r.total_seconds), href=link),
            ]
        )
    return Section("Results", [PageTable(header, rows, words(comparison.noun)["results"])], "results")


def _cost(recipe: RecipeResult, link: str) -> Cell:
    """Return the cell of the parameters, and below them the FLOPs of training for each predicted token."""
    cost = recipe.cost
    if cost is None:
        return Cell("–", href=link, tone="faint")
    each = cost.flops_per_token
    small = [f"{amount(cost.without_embeddings)} without embeddings"]
    small += [] if each is None else [f"{amount(each)} FLOPs a token"]
    return Cell(amount(cost.parameters), Markup("<br>").join(small), link)


def _score(metric: Metric, recipe: RecipeResult, best: float) -> Cell:
    """Return the cell of a recipe's mean score, with its interval and seeds, emphasised if it is the best."""
    mean, link = recipe.means.get(metric.name), f"#{slug(recipe.name)}"
    if mean is None:
        return Cell("none", recipe.by_seed(metric), link, "alarm")
    ends = [f"{metric.shown(mean.low)} to {metric.shown(mean.high)}"] if mean.low is not None else []
    small = Markup("<br>").join([*ends, recipe.by_seed(metric)])
    return Cell(metric.shown(mean.value), small, link, "best" if metric.sort_key(mean.value) == best else "")


def _share(recipe: RecipeResult, link: str) -> Cell:
    if recipe.trains is None:
        return Cell("none", recipe.states, link, "alarm")
    low, high = recipe.trains.low or 0.0, recipe.trains.high or 0.0
    small = [f"{100 * low:.0f}% to {100 * high:.0f}%"]
    small += [recipe.states] if recipe.trained < len(recipe.outcomes) else []
    tone = "" if recipe.trained else "alarm"
    return Cell(f"{recipe.trained} of {recipe.ended}", Markup("<br>").join(small), link, tone)


def _seed_links(recipe: RecipeResult, seeds: Sequence[int]) -> Markup:
    form = Markup('<a href="#run-{}" title="run {}: {}">{}{}</a>')
    parts = [
        form.format(run, run, outcome, seed, "" if has_trained(outcome) else " ✕")
        for run, seed, outcome in zip(recipe.runs, seeds, recipe.outcomes, strict=False)
    ]
    return Markup(", ").join(parts)


ANSWERS: Final = {
    "better": ("a difference", "good"),
    "equal": ("none that matters", ""),
    "open": ("open", "faint"),
}


def _pairs(comparison: Comparison) -> Iterator[Section]:
    """Yield what is known of pairs: which is better, which trains more often, which of these models is."""
    metric, said, named = comparison.headline, words(comparison.noun), names(comparison)
    better = [
        [Cell(word, tone=tone), Cell(sentence(comparison, d.sentence), linked(comparison, d.costs))]
        for d in comparison.differences
        for word, tone in [ANSWERS[d.answer]]
    ]
    often = [d.trains_sentence for d in comparison.differences if d.trains_sentence]
    models = [
        [
            Cell(Markup("{} minus {}").format(named[d.a], named[d.b])),
            Cell(metric.signed(d.models).replace("-", "−")),
            Cell(p_value(d.p_models)),
        ]
        for d in comparison.differences
        if d.models is not None and d.p_models is not None
    ]
    if better:
        intro = said["differences"].format(title=metric.title, margin=metric.amount(comparison.margin))
        intro += f" {comparison.noise_floor}." if comparison.noise_floor else ""
        yield Section("Which differences are real?", _folded(("", "answer"), better), "differences", intro)
    if often:
        intro = "Fisher’s exact test on the numbers of seeds, p corrected for the number of pairs."
        rows = [[Cell(sentence(comparison, one))] for one in often]
        yield Section("Does one train more often than another?", _folded(("answer",), rows), "often", intro)
    if models:
        table = _folded(("models", metric.label, "p"), models)
        yield Section("These very models", table, "models", said["models"])


def _folded(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Block]:
    """Return a table that shows the rows beyond ``ROWS_OPEN`` only on request."""
    columns = 2 if header[-1] == "answer" else 1
    blocks: list[Block] = [PageTable(header, rows[:ROWS_OPEN], text_columns=columns)]
    if rows[ROWS_OPEN:]:
        rest = PageTable(header, rows[ROWS_OPEN:], text_columns=columns)
        more = count(len(rows) - ROWS_OPEN, "more pair")
        blocks.append(Details(more, [rest], beside="comparison.json"))
    return blocks


def _samples(comparison: Comparison) -> list[Section]:
    if not comparison.samples:
        return []
    place = {r.name: i for i, r in enumerate(comparison.recipes)}
    cards = [Html(_sample(sample, place, comparison.sample_labels)) for sample in comparison.samples]
    blocks: list[Block] = list(cards[:SAMPLES_OPEN])
    if cards[SAMPLES_OPEN:]:
        blocks.append(Details(f"{count(len(cards) - SAMPLES_OPEN, 'more sample')}", cards[SAMPLES_OPEN:]))
    intro = f"Seed {comparison.sample_seed}, chosen learning rate."
    if any(sample.reference for sample in comparison.samples):
        intro += f" Marked: words that the {comparison.sample_labels[1]} does not have at that place."
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
    """Return the output; if there is a reference, words without a counterpart in it are marked."""
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
            table = settings_table(r.explained)
            inside.insert(0, Details("What the recipe resolves to", [table], beside="comparison.json"))
        blocks.append(Section(breakable(r.name), inside, slug(r.name), r.resolves_to, listed=False))
        rest = [i for i in rest if i not in ids]
    if rest:
        others = [run_details(views[i], common) for i in rest]
        blocks.append(Section("Others", others, "runs-other", listed=False))
    return Section("Every run, exactly", blocks, "runs", "The command shown with a run repeats it.")


def _method(comparison: Comparison) -> Section:
    said, seed = words(comparison.noun), comparison.sweep_seed
    choice = said["no_choice" if seed is None else "choice"]
    choice = choice.format(seed=seed, metric=comparison.rate_metric.label)
    choice = f"{choice} {comparison.seen_before or said['apart']}"
    metric, labels = comparison.headline, {metric.name: metric.label for metric in comparison.metrics}
    better = "higher" if metric.higher_is_better else "lower"
    last = "the last weights of each run count"
    chosen = f"the checkpoint of each run was chosen by dev {comparison.dev_metric.label}"
    scored = (
        f"{comparison.noun.capitalize()}s are compared by test {metric.title} ({better} is better); "
        f"{chosen if comparison.best_by else last}."
    )
    blocks: list[Block] = [Text(choice), Text(scored)]
    blocks += [Text(text.format(points=POINTS)) for text in said["method"]]
    blocks += [
        Text(f"Signature of {labels.get(name, name)}: {signature}", "note")
        for name, signature in comparison.signatures.items()
    ]
    if comparison.command:
        blocks.append(Code(comparison.command))
    if comparison.data:
        blocks.append(settings_table(comparison.data))
    return Section("How this was measured", blocks, "method")
