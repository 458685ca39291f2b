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
from normlab.report.comparison_charts import chart_sections
from normlab.report.comparison_frames import all_runs
from normlab.report.comparison_words import linked, names, notes, sentence, slug, words
from normlab.report.judge import ANSWERS_OF_PAIRS
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
"""So many pairs of recipes are shown from the start, and the others on request."""

SAMPLES_OPEN: Final = 6
"""So many samples are shown from the start, and the others on request."""


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
    missing = [run for run, run_view in views.items() if run_view.problem]
    stale = [run for run, run_view in views.items() if run_view.stale]
    headline, *others = comparison.sentences
    lead = Markup(" ").join(sentence(comparison, text) for text in others)
    if comparison.seen_before:
        lead += Markup(' <span class="alarm">{}</span>').format(comparison.seen_before)
    return Page(
        title=comparison.title,
        headline=linked(comparison, headline),
        facts=_facts(comparison, views),
        lead=lead,
        series=[r.name for r in comparison.recipes],
        legend="Setups" if comparison.noun == "setup" else "Recipes",
        blocks=[
            *chart_sections(comparison, views, list(notes(comparison, missing, stale))),
            _results(comparison),
            *_pairs(comparison),
            *_samples(comparison),
            _runs(comparison, views),
            _method(comparison),
        ],
    )


def _facts(comparison: Comparison, views: Mapping[str, RunView]) -> list[str]:
    spent = sum(recipe.total_seconds for recipe in comparison.recipes)
    facts = [comparison.progress] if comparison.progress else []
    return [
        *facts,
        comparison.date,
        count(len(comparison.recipes), comparison.noun),
        count(len(comparison.lrs), "learning rate"),
        count(len(comparison.seeds), "seed"),
        f"{count(len(views), 'run')}, {duration(spent)} of training",
        comparison.machine,
    ]


def _results(comparison: Comparison) -> Section:
    headline, *others = comparison.tested or comparison.metrics[:1]
    with_cost = any(recipe.cost for recipe in comparison.recipes)
    header = [comparison.noun, f"test {headline.label}", "trained", "learning rate", "seeds"]
    header += [metric.label for metric in others]
    if with_cost:
        header.append("parameters")
    header += ["one run", "all runs"]
    rows = []
    for recipe in comparison.ranked:
        link = f"#{slug(recipe.name)}"
        row = [
            _name_cell(comparison, recipe),
            _score(comparison, headline, recipe),
            _share(recipe, link),
            _rate_cell(recipe),
            Cell(_seed_links(recipe, comparison.seeds)),
        ]
        row += [_score(comparison, metric, recipe) for metric in others]
        if with_cost:
            row.append(_cost(recipe, link))
        row += [
            Cell(duration(seconds), href=link) for seconds in (recipe.train_seconds, recipe.total_seconds)
        ]
        rows.append(row)
    return Section("Results", [PageTable(header, rows, words(comparison.noun)["results"])], "results")


def _name_cell(comparison: Comparison, recipe: RecipeResult) -> Cell:
    """Return the cell of a recipe's name, with its line in the charts and whether it was forced."""
    name = swatch(_places(comparison)[recipe.name]) + breakable(recipe.name)
    if recipe.forced:
        name += Markup(" ") + tag("forced")
    return Cell(name, recipe.resolves_to, f"#{slug(recipe.name)}", title=recipe.forced)


def _places(comparison: Comparison) -> dict[str, int]:
    """The place of each recipe in the order of the colours."""
    return {recipe.name: place for place, recipe in enumerate(comparison.recipes)}


def _rate_cell(recipe: RecipeResult) -> Cell:
    """Return the cell of the chosen learning rate, which links to its run in the sweep if there was one."""
    for trial in recipe.trials:
        if trial.lr == recipe.lr:
            return Cell(rate(recipe.lr), href=f"#run-{trial.run}")
    return Cell(rate(recipe.lr), href=f"#{slug(recipe.name)}")


def _cost(recipe: RecipeResult, link: str) -> Cell:
    """Return the cell of the parameters, and below them the FLOPs of training for each predicted token."""
    cost = recipe.cost
    if cost is None:
        return Cell("–", href=link, tone="faint")
    small = [f"{amount(cost.without_embeddings)} without embeddings"]
    if cost.flops_per_token is not None:
        small.append(f"{amount(cost.flops_per_token)} FLOPs a token")
    return Cell(amount(cost.parameters), Markup("<br>").join(small), link)


def _score(comparison: Comparison, metric: Metric, recipe: RecipeResult) -> Cell:
    """Return the cell of a recipe's mean score, with its interval and seeds, emphasised if it is the best."""
    mean, link = recipe.means.get(metric.name), f"#{slug(recipe.name)}"
    if mean is None:
        return Cell("none", recipe.by_seed(metric), link, "alarm")
    small = [recipe.by_seed(metric)]
    if mean.low is not None:
        small.insert(0, f"{metric.shown(mean.low)} to {metric.shown(mean.high)}")
    best = max(metric.sort_key(other.value(metric)) for other in comparison.recipes)
    tone = "best" if metric.sort_key(mean.value) == best else ""
    return Cell(metric.shown(mean.value), Markup("<br>").join(small), link, tone)


def _share(recipe: RecipeResult, link: str) -> Cell:
    if recipe.trains is None:
        return Cell("none", recipe.states, link, "alarm")
    low, high = recipe.trains.low or 0.0, recipe.trains.high or 0.0
    small = [f"{100 * low:.0f}% to {100 * high:.0f}%"]
    if recipe.trained < len(recipe.outcomes):
        small.append(recipe.states)
    tone = "" if recipe.trained else "alarm"
    return Cell(f"{recipe.trained} of {recipe.ended}", Markup("<br>").join(small), link, tone)


def _seed_links(recipe: RecipeResult, seeds: Sequence[int]) -> Markup:
    form = Markup('<a href="#run-{}" title="run {}: {}">{}{}</a>')
    parts = [
        form.format(run, run, outcome, seed, "" if has_trained(outcome) else " ✕")
        for run, seed, outcome in zip(recipe.runs, seeds, recipe.outcomes, strict=False)
    ]
    return Markup(", ").join(parts)


def _pairs(comparison: Comparison) -> Iterator[Section]:
    """Yield what is known of pairs: which one is better, which trains more often, whose models are better."""
    yield from _better(comparison)
    yield from _more_often(comparison)
    yield from _better_models(comparison)


def _better(comparison: Comparison) -> Iterator[Section]:
    if not comparison.differences:
        return
    rows = []
    for difference in comparison.differences:
        word, tone = ANSWERS_OF_PAIRS[difference.answer]
        answer = sentence(comparison, difference.sentence)
        rows.append([Cell(word, tone=tone), Cell(answer, linked(comparison, difference.costs))])
    metric, form = comparison.headline, words(comparison.noun)["differences"]
    intro = form.format(title=metric.title, margin=metric.amount(comparison.margin))
    if comparison.noise_floor:
        intro += f" {comparison.noise_floor}."
    table = _folded(("", "answer"), rows, text_columns=2)
    yield Section("Which differences are real?", table, "differences", intro)


def _more_often(comparison: Comparison) -> Iterator[Section]:
    sentences = [d.trains_sentence for d in comparison.differences if d.trains_sentence]
    if sentences:
        intro = "Fisher’s exact test on the numbers of seeds, p corrected for the number of pairs."
        rows = [[Cell(sentence(comparison, text))] for text in sentences]
        table = _folded(("answer",), rows, text_columns=2)
        yield Section("Does one train more often than another?", table, "often", intro)


def _better_models(comparison: Comparison) -> Iterator[Section]:
    metric, links = comparison.headline, names(comparison)
    rows = [
        [
            Cell(Markup("{} minus {}").format(links[d.a], links[d.b])),
            Cell(metric.signed(d.models).replace("-", "−")),
            Cell(p_value(d.p_models)),
        ]
        for d in comparison.differences
        if d.models is not None and d.p_models is not None
    ]
    if rows:
        table = _folded(("models", metric.label, "p"), rows, text_columns=1)
        yield Section("These very models", table, "models", words(comparison.noun)["models"])


def _folded(header: Sequence[str], rows: Sequence[Sequence[Cell]], *, text_columns: int) -> list[Block]:
    """Return a table that shows the rows beyond ``ROWS_OPEN`` only on request."""
    blocks: list[Block] = [PageTable(header, rows[:ROWS_OPEN], text_columns=text_columns)]
    if rows[ROWS_OPEN:]:
        rest = PageTable(header, rows[ROWS_OPEN:], text_columns=text_columns)
        more = count(len(rows) - ROWS_OPEN, "more pair")
        blocks.append(Details(more, [rest], beside="comparison.json"))
    return blocks


def _samples(comparison: Comparison) -> list[Section]:
    if not comparison.samples:
        return []
    cards = [Html(_sample(comparison, sample)) for sample in comparison.samples]
    blocks: list[Block] = list(cards[:SAMPLES_OPEN])
    if cards[SAMPLES_OPEN:]:
        more = count(len(cards) - SAMPLES_OPEN, "more sample")
        blocks.append(Details(more, cards[SAMPLES_OPEN:]))
    intro = f"Seed {comparison.sample_seed}, chosen learning rate."
    if any(sample.reference for sample in comparison.samples):
        intro += f" Marked: words that the {comparison.sample_labels[1]} does not have at that place."
    return [Section("Samples, side by side", blocks, "samples", intro)]


def _sample(comparison: Comparison, sample: Sample) -> Markup:
    """Return a list of a sample's given texts and of every output."""
    places = _places(comparison)
    source_label, reference_label = comparison.sample_labels
    lines = Markup('<dt>{}</dt><dd class="given">{}</dd>').format(source_label, sample.source)
    if sample.reference:
        form = Markup('<dt class="last">{}</dt><dd class="last">{}</dd>')
        lines += form.format(reference_label, sample.reference)
    for name, output in sample.outputs.items():
        label = swatch(places[name]) + " " + name if name in places else name
        lines += Markup("<dt>{}</dt><dd>{}</dd>").format(label, _marked(output, sample.reference))
    return Markup('<div class="sample outputs"><dl>{}</dl></div>').format(lines)


def _marked(output: str, reference: str) -> Markup:
    """Return the output; if there is a reference, words without a counterpart in it are marked."""
    if not output.strip():
        return Markup('<span class="tag">empty output</span>')
    if not reference:
        return Markup.escape(output)
    output_words = output.split()
    matcher = SequenceMatcher(None, output_words, reference.split(), autojunk=False)
    parts = []
    for kind, start, end, _, _ in matcher.get_opcodes():
        text = " ".join(output_words[start:end])
        if not text:  # words that only the reference has
            continue
        parts.append(Markup.escape(text) if kind == "equal" else Markup("<mark>{}</mark>").format(text))
    return Markup(" ").join(parts)


def _runs(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    common = shared(list(views.values())) if len(views) > 1 else {}
    blocks: list[Block] = []
    if common:
        blocks.append(Details("Settings that all runs share", [settings_table(common)]))
    left = dict(views)  # a run that several recipes share is shown once, with the first of them
    for recipe in comparison.recipes:
        inside: list[Block] = []
        if recipe.explained:
            table = settings_table(recipe.explained)
            inside.append(Details("What the recipe resolves to", [table], beside="comparison.json"))
        for run in (*(trial.run for trial in recipe.trials), *recipe.runs):
            if run in left:
                inside.append(run_details(left.pop(run), common))
        title = breakable(recipe.name)
        blocks.append(Section(title, inside, slug(recipe.name), recipe.resolves_to, listed=False))
    if left:
        others = [run_details(run_view, common) for run_view in left.values()]
        blocks.append(Section("Others", others, "runs-other", listed=False))
    return Section("Every run, exactly", blocks, "runs", "The command shown with a run repeats it.")


def _method(comparison: Comparison) -> Section:
    texts, seed = words(comparison.noun), comparison.sweep_seed
    choice = texts["no_choice" if seed is None else "choice"]
    choice = choice.format(seed=seed, metric=comparison.rate_metric.label)
    blocks: list[Block] = [
        Text(f"{choice} {comparison.seen_before or texts['apart']}"),
        Text(_how_compared(comparison)),
    ]
    blocks += [Text(text.format(points=POINTS)) for text in texts["method"]]
    labels = {metric.name: metric.label for metric in comparison.metrics}
    for name, signature in comparison.signatures.items():
        blocks.append(Text(f"Signature of {labels.get(name, name)}: {signature}", "note"))
    if comparison.command:
        blocks.append(Code(comparison.command))
    if comparison.data:
        blocks.append(settings_table(comparison.data))
    return Section("How this was measured", blocks, "method")


def _how_compared(comparison: Comparison) -> str:
    """By which score recipes are compared, and at which checkpoint of each run."""
    metric = comparison.headline
    better = "higher" if metric.higher_is_better else "lower"
    checkpoint = "the last weights of each run count"
    if comparison.best_by:
        checkpoint = f"the checkpoint of each run was chosen by dev {comparison.dev_metric.label}"
    return (
        f"{comparison.noun.capitalize()}s are compared by test {metric.title} ({better} is better); "
        f"{checkpoint}."
    )
