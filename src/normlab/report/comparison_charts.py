"""A comparison as polars frames, and the charts, sentences, links and notes of its page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import polars as pl
from markupsafe import Markup

from normlab.base.metric import IGNORES_SOURCE, NLL, Metric
from normlab.base.units import count, duration, rate
from normlab.lab.comparison.result import Comparison, choose, has_trained
from normlab.report.charts.comparison import CurveAxis, curve, score_dots, sensitivity, time_bars
from normlab.report.charts.drawing import Drawn
from normlab.report.charts.theme import POINTS
from normlab.report.page import Chart, Columns, Notes, Section, Text, anchor, breakable
from normlab.report.runs import RunView, run_frame

TRAIN = ("nll", "grad_norm_l2", "tokens")
WHO = ("recipe", "run", "seed", "outcome")


def all_runs(comparison: Comparison) -> list[str]:
    """Return every run id once: by recipe, the sweep first, then the other seeds, then failed runs."""
    ids = [run for r in comparison.recipes for run in (*(t.run for t in r.trials), *r.runs)]
    ids += [entry.partition(":")[0].strip() for entry in comparison.failed]
    return [run for run in dict.fromkeys(ids) if run]


def _seed_curves(
    comparison: Comparison, views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    """Return the curves of each recipe at its chosen learning rate, one row per step and run."""
    runs = [
        (recipe.name, run, str(seed), outcome)
        for recipe in comparison.recipes
        for run, seed, outcome in zip(recipe.runs, comparison.seeds, recipe.outcomes, strict=False)
    ]
    return _curves(runs, views, kind, columns)


def _trial_curves(comparison: Comparison, views: Mapping[str, RunView], lr: float) -> pl.DataFrame:
    """Return the training curves of every recipe at one learning rate, with the seed of the sweep."""
    seed = str(comparison.sweep_seed)
    runs = [(r.name, t.run, seed, t.outcome) for r in comparison.recipes for t in r.trials if t.lr == lr]
    return _curves(runs, views, "train", ("nll",))


def _curves(
    runs: Iterable[tuple[str, str, str, str]], views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    known = [(views[who[1]], who) for who in runs if who[1] in views]
    none = RunView(""), ("", "", "", "")
    return pl.concat(
        run_frame(seen, kind, columns, dict(zip(WHO, who, strict=True))) for seen, who in [none, *known]
    )


def _against_cost(dev: pl.DataFrame, train: pl.DataFrame, comparison: Comparison) -> pl.DataFrame:
    """Add what training up to a step took, at each recipe's mean pace, so that its seeds stay aligned:
    ``minutes``, ``seen`` (the tokens that were predicted) and ``flops``, null if the recipe's are not known.
    """
    flops = {r.name: r.cost.flops_per_token if r.cost else None for r in comparison.recipes}
    tokens = train.group_by("recipe").agg(tokens=pl.col("tokens").sum() / pl.col("step").sum())
    seconds = (pl.col("seconds").sum() / pl.col("step").sum()).over("recipe")
    seen = pl.col("step") * pl.col("tokens")
    return dev.join(tokens, on="recipe", how="left").with_columns(
        minutes=pl.col("step") * seconds / 60,
        seen=seen,
        flops=seen * pl.col("recipe").replace_strict(flops, return_dtype=pl.Float64),
    )


def _trials(comparison: Comparison) -> pl.DataFrame:
    """Return the sweep, one row per recipe and learning rate; ``dev`` is the score that decides."""
    rows = [
        (r.name, t.lr, t.run, t.dev.get(comparison.rate_by), t.dev.get(NLL.name), t.outcome, t.lr == r.lr)
        for r in comparison.recipes
        for t in r.trials
    ]
    schema = {"recipe": pl.String, "lr": pl.Float64, "run": pl.String, "dev": pl.Float64}
    schema |= {"dev_nll": pl.Float64, "outcome": pl.String, "chosen": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _results(comparison: Comparison) -> pl.DataFrame:
    """Return one row per recipe: the headline test score (``value``) with the ends of its interval, the other
    test scores by name, how many seeds trained, the chosen learning rate and the time.
    """
    headline = comparison.headline
    rows = [
        {
            "recipe": r.name,
            "value": r.value(headline),
            "low": found.low if found else None,
            "high": found.high if found else None,
            **{m.name: r.value(m) for m in comparison.tested if m != headline},
            "trained": r.trained,
            "seeds": r.ended,
            "lr": r.lr,
            "note": r.states if r.trained < len(r.outcomes) else "",
            "minutes": r.train_seconds / 60,
            "total_minutes": r.total_seconds / 60,
            "words": duration(r.train_seconds),
        }
        for r in comparison.recipes
        for found in [r.means.get(headline.name)]
    ]
    texts = ("recipe", "note", "words")
    schema = {name: pl.String if name in texts else pl.Float64 for name in (rows[0] if rows else texts)}
    return pl.DataFrame(rows, schema=schema)


def _seed_scores(comparison: Comparison) -> pl.DataFrame:
    """Return the headline test score of each seed's run, if it has one."""
    headline = comparison.headline.name
    rows = [
        (r.name, str(seed), run, outcome, float(value))
        for r in comparison.recipes
        for seed, run, outcome, value in zip(
            comparison.seeds, r.runs, r.outcomes, r.scores.get(headline, ()), strict=False
        )
        if value is not None
    ]
    schema = {**dict.fromkeys(("recipe", "seed", "run", "outcome"), pl.String), "value": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


@cache
def words(noun: str) -> Mapping[str, Any]:
    """The words of the page that depend only on the noun of what is compared, from
    ``templates/comparison.toml``.
    """
    file = Path(__file__).with_name("templates") / "comparison.toml"
    text = file.read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{noun}", noun).replace("{Noun}", noun.capitalize()))


SPIKY_POINTS: Final = 60
"""Points of a curve that is mostly noise: so few that its mean is readable; the band keeps every spike."""

LOSS: Final = CurveAxis("nll", NLL.title)
NORM: Final = CurveAxis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g")


def dev_axis(metric: Metric) -> CurveAxis:
    """Return the axis of a dev score; it begins at zero if higher is better."""
    zero = metric.higher_is_better
    return CurveAxis(metric.name, f"dev {metric.title}", zero=zero, number=f".{metric.digits}f")


def curves(
    name: str,
    title: str,
    caption: str,
    frame: pl.DataFrame,
    lines: Sequence[str],
    axis: CurveAxis,
    *,
    most: int = POINTS,
    entropy_nats: float | None = None,
) -> Chart:
    """Return the chart of a frame's curves, of at most so many points each; its CSV file is the frame."""

    def drawn(points: int) -> Drawn:
        return curve(frame, lines, axis, points=min(points, most), entropy_nats=entropy_nats)

    return Chart(name, title, caption, drawn, csv=frame.write_csv)


def pictures(comparison: Comparison, views: Mapping[str, RunView], known: Sequence[Text]) -> list[Section]:
    """Return the sections of charts, the most important first; ``known`` stands below the first two."""
    recipes = [r.name for r in comparison.recipes]
    result, headline = _results(comparison), comparison.headline
    said = words(comparison.noun)
    drawn = score_dots(result, _seed_scores(comparison), recipes, headline)
    scores = said["scores"].format(far="below half" if headline.higher_is_better else "above twice")
    first = [Chart(f"test-{headline.name}", f"Test {headline.label}", scores, drawn, csv=result.write_csv)]
    if len(comparison.lrs) > 1:
        sweep, title = _trials(comparison), "Sensitivity to the learning rate"
        drawn = sensitivity(sweep, recipes, sorted(comparison.lrs), comparison.rate_metric)
        first.append(Chart("learning-rate", title, said["sweep"], drawn, csv=sweep.write_csv))
    return [
        Section("", [Columns(first), Notes(known)], "glance", listed=False),
        Section("While training", [_seed_grid(comparison, views)], "training", said["training"]),
        *_sweep_section(comparison, views),
        _time_section(comparison, views, result),
    ]


def _seed_grid(comparison: Comparison, views: Mapping[str, RunView]) -> Columns:
    recipes = [r.name for r in comparison.recipes]
    train = _seed_curves(comparison, views, "train", TRAIN)
    dev = _seed_curves(comparison, views, "dev", [m.name for m in comparison.validated])
    nats = comparison.unigram_entropy_nats
    nll = "Negative log-likelihood (NLL), without label smoothing."
    norm = "Before clipping, log scale. Here the band shows single spikes, too."
    charts = [
        curves(f"dev-{m.name}", f"Dev {m.label}", "At each validation.", dev, recipes, dev_axis(m))
        for m in comparison.validated
    ]
    loss = curves("train-nll", "Training loss", nll, train, recipes, LOSS, entropy_nats=nats)
    spiky = curves("grad-norm", "Gradient norm", norm, train, recipes, NORM, most=SPIKY_POINTS)
    return Columns([*charts, loss, *([spiky] if train[NORM.column].count() else [])])


def _sweep_section(comparison: Comparison, views: Mapping[str, RunView]) -> Iterator[Section]:
    if len(comparison.lrs) < 2:
        return
    recipes, axis = [r.name for r in comparison.recipes], replace(LOSS, height=190)
    nats, charts = comparison.unigram_entropy_nats, list[Chart]()
    for lr in sorted(comparison.lrs):
        frame, name = _trial_curves(comparison, views, lr), f"train-nll-lr-{rate(lr)}"
        title = f"Learning rate {rate(lr)}"
        charts.append(curves(name, title, "", frame, recipes, axis, entropy_nats=nats))
    intro = f"Training loss of every {comparison.noun} at every learning rate, seed {comparison.sweep_seed}."
    yield Section("The sweep, run by run", [Columns(charts, wide=310)], "sweep", intro)


def _time_section(comparison: Comparison, views: Mapping[str, RunView], result: pl.DataFrame) -> Section:
    recipes = [r.name for r in comparison.recipes]
    metric = comparison.dev_metric
    dev = _seed_curves(comparison, views, "dev", (metric.name, "seconds"))
    dev = _against_cost(dev, _seed_curves(comparison, views, "train", TRAIN), comparison)
    bars = Chart(
        "time",
        "Training time of a run",
        "Median over the seeds. Stuck and diverged runs are stopped early.",
        time_bars(result, recipes),
        csv=result.select("recipe", "minutes", "total_minutes", "note").write_csv,
    )
    at = f"At each {comparison.noun}'s mean speed over its seeds."
    axes = {
        "time": (at, "minutes", "training time, minutes", "~r"),
        "tokens": ("Tokens that were predicted in training.", "seen", "training tokens", "~s"),
        "FLOPs": ("Of matrix products in the forward and backward passes.", "flops", "training FLOPs", "~e"),
    }
    drawn = list[Chart]()
    for against, (caption, x, x_title, x_number) in axes.items():
        axis = replace(dev_axis(metric), height=260, x=x, x_title=x_title, x_number=x_number)
        name, title = f"dev-{metric.name}-by-{against.lower()}", f"Dev {metric.label} against {against}"
        if x == "minutes" or dev[x].sum():
            drawn.append(curves(name, title, caption, dev, recipes, axis))
    return Section("Cost", [Columns([*drawn, bars])], "cost")


VERBS: Final = {"stuck": "was stuck", IGNORES_SOURCE: "ignored its source"}
"""What a run with an outcome did, if the outcome's own word does not say it."""


def listing(items: Iterable[str]) -> Markup:
    """Join items: ``a``, ``a and b``, ``a, b and c``; plain strings are escaped."""
    parts = [Markup.escape(item) for item in items]
    if len(parts) < 2:
        return Markup("").join(parts)
    return Markup("{} and {}").format(Markup(", ").join(parts[:-1]), parts[-1])


def slug(name: str) -> str:
    """Return a recipe's anchor."""
    return f"recipe-{anchor(name)}"


def names(comparison: Comparison) -> dict[str, Markup]:
    """Return each recipe's name, underlined in its colour and linked to its runs."""
    form = Markup('<a class="recipe" href="#{}" style="text-decoration-color: var(--recipe-{})">{}</a>')
    return {r.name: form.format(slug(r.name), i, breakable(r.name)) for i, r in enumerate(comparison.recipes)}


def linked(comparison: Comparison, sentence: str) -> Markup:
    """Return one of the comparison's sentences with every recipe's name underlined and linked."""
    called = names(comparison)
    either = "|".join(re.escape(name) for name in sorted(called, key=len, reverse=True))
    parts = re.split(rf"(?<![\w+/:])({either})(?![\w+/]|:\S)", sentence) if called else [sentence]
    return Markup("").join(called.get(part, part) for part in parts)


def sentence(comparison: Comparison, said: str) -> Markup:
    """Return a sentence with a capital letter, unless it begins with a recipe's name, and a full stop."""
    begins = any(said.startswith(r.name) for r in comparison.recipes)
    return linked(comparison, (said if begins else said[:1].upper() + said[1:]) + ".")


def notes(comparison: Comparison, missing: Sequence[str] = (), stale: Sequence[str] = ()) -> Iterator[Text]:
    """Yield failures, choices at the edge of the sweep, and limits of the conclusion."""
    called = names(comparison)
    if comparison.progress:
        yield Text(f"{comparison.progress}; the others follow.", "alarm")
    yield from _trouble(comparison, called)
    yield from _edges(comparison, called)
    for recipe in comparison.recipes:
        if recipe.forced:
            yield Text(Markup("{} was forced: {}.").format(called[recipe.name], recipe.forced), "alarm")
    for entry in comparison.failed:
        run, _, reason = map(str.strip, entry.partition(":"))
        text = Markup('Run <a href="#run-{0}">{0}</a> ended in an error').format(run)
        yield Text(text + Markup(": {}").format(reason) if reason else text, "alarm")
    if missing:
        said = f"{count(len(missing), 'run folder')} could not be read, so their curves are missing: "
        yield Text(Markup.escape(said) + listing(missing), "alarm")
    if stale:
        said = f"{count(len(stale), 'stale run')}, made by older code; today's gives other numbers: "
        links = listing(Markup('<a href="#run-{0}">{0}</a>').format(run) for run in stale)
        yield Text(Markup.escape(said) + links, "alarm")


def _trouble(comparison: Comparison, called: Mapping[str, Markup]) -> Iterator[Text]:
    """Yield a note for each recipe that did not train everywhere, and one for all the others."""
    fine = []
    for recipe in comparison.recipes:
        parts, name = list[Markup](), called[recipe.name]
        for state in dict.fromkeys(t.outcome for t in recipe.trials if not has_trained(t.outcome)):
            rates = [rate(t.lr) for t in recipe.trials if t.outcome == state]
            parts.append(Markup("{} at {}").format(VERBS.get(state, state), listing(rates)))
        if recipe.trained < len(recipe.outcomes):
            chosen = "at the chosen {}" if recipe.trials else "at {}"
            form = Markup(f"{chosen} its seeds ended so: {{}}")
            parts.append(form.format(rate(recipe.lr), recipe.states))
        if parts:
            yield Text(Markup("{} {}.").format(name, listing(parts)), "alarm")
        else:
            fine.append(name)
        if recipe.trials and (best := choose(recipe.trials)) != recipe.lr:
            form = Markup("The rate of {} was chosen by dev {}; by dev loss it would have been {}.")
            yield Text(form.format(name, comparison.rate_metric.label, rate(best)), "alarm")
    if fine:
        number = len(comparison.lrs)
        several = "both" if number == 2 else f"all {number}"
        every = "the learning rate tried" if number == 1 else f"{several} learning rates"
        yield Text(Markup("{} trained at {}, and with every seed.").format(listing(fine), every))


def _edges(comparison: Comparison, called: Mapping[str, Markup]) -> Iterator[Text]:
    tried = [r for r in comparison.ranked if r.trained and r.trials]
    form = Markup("{} did best at the {} learning rate tried, {}; a {} one may be better still.")
    for edge, side, more in ((max, "largest", "larger"), (min, "smallest", "smaller")):
        if there := [r for r in tried if r.lr == edge(t.lr for t in r.trials)]:
            rates = " and ".join(dict.fromkeys(rate(r.lr) for r in there))
            yield Text(form.format(listing(called[r.name] for r in there), side, rates, more))
