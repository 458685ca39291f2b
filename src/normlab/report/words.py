"""The sentences of a comparison's page, all computed from the comparison."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from markupsafe import Markup

from normlab.report.page import Text
from normlab.spec.comparison import Comparison, Difference, Interval, RecipeResult
from normlab.spec.metric import Metric
from normlab.spec.outcome import IGNORES_SOURCE
from normlab.spec.units import count, p_value, rate


def signed(value: float, metric: Metric) -> str:
    """Format a difference: ``+1.3``, ``−0.4`` (with a true minus), ``0.0`` without a sign."""
    return metric.signed(value).replace("-", "−")


def interval(found: Interval, metric: Metric, *, sign: bool = False) -> str:
    """Format an interval: ``37.2 to 38.9``, or with signs for a difference."""
    low, high = (signed(v, metric) if sign else metric.shown(v) for v in (found.low, found.high))
    return f"{low} to {high}"


def amount(value: float, metric: Metric) -> str:
    """Format a score with its metric: ``1.234 bits per byte``."""
    return f"{metric.shown(value)} {metric.label}"


def listing(items: Iterable[str]) -> Markup:
    """Join items: ``a``, ``a and b``, ``a, b and c``; plain strings are escaped."""
    parts = [Markup.escape(item) for item in items]
    if len(parts) < 2:
        return Markup("").join(parts)
    return Markup("{} and {}").format(Markup(", ").join(parts[:-1]), parts[-1])


def slug(name: str) -> str:
    """Return a recipe's anchor: ``pre+fixnorm`` -> ``recipe-pre-2b-fixnorm``; it is unique to the name."""
    return "recipe-" + "".join(c if c.isalnum() and c.isascii() else f"-{ord(c):x}-" for c in name)


def names(comparison: Comparison) -> dict[str, Markup]:
    """Return each recipe's name, underlined in its colour and linked to its runs."""
    form = Markup('<a class="recipe" href="#{}" style="text-decoration-color: var(--recipe-{})">{}</a>')
    return {r.name: form.format(slug(r.name), i, breakable(r.name)) for i, r in enumerate(comparison.recipes)}


def breakable(name: str) -> Markup:
    """Return a recipe's name with permitted line breaks after ``+``, ``/`` and ``:``."""
    return Markup("<wbr>").join(re.split(r"(?<=[+/:])", name))


def ranking(comparison: Comparison) -> list[tuple[RecipeResult, float]]:
    """Return the recipes with a test score and at least one run that trained, the best first."""
    metric = comparison.headline
    scored = [(r, r.value(metric)) for r in comparison.recipes if "trained" in r.outcomes]
    learned = [(r, value) for r, value in scored if value is not None]
    return sorted(learned, key=lambda pair: metric.merit(pair[1]), reverse=True)


def difference(comparison: Comparison, a: str, b: str) -> Difference | None:
    """Return the difference ``a`` minus ``b``; None if the comparison has neither it nor its opposite."""
    for d in comparison.differences:
        if (d.a, d.b) == (a, b):
            return d
        if (d.a, d.b) == (b, a):
            return replace(d, a=a, b=b, delta=Interval(-d.delta.value, -d.delta.high, -d.delta.low))
    return None


def headline(comparison: Comparison) -> Markup:
    """Name the best recipe and its lead, or the recipes that cannot be told apart."""
    called, metric = names(comparison), comparison.headline
    ranked = ranking(comparison)
    if not comparison.recipes:
        return Markup("No recipe is finished yet")
    if not ranked:
        number = len(comparison.recipes)
        return Markup("{} learned at the learning rates tried").format(
            "The recipe did not" if number == 1 else f"None of the {number} recipes"
        )
    (best, score), *others = ranked
    reaches = Markup("{} reaches {}").format(called[best.name], amount(score, metric))
    if not others:
        alone = Markup("") if len(comparison.recipes) == 1 else Markup(", the only recipe that learned")
        return reaches + alone
    level = [r.name for r, _ in others if not _beaten(comparison, best.name, r.name)]
    if not level:
        second, second_score = others[0]
        ahead = metric.shown(abs(score - second_score))
        return Markup("{} is best: {}, {} ahead of {}").format(
            called[best.name], amount(score, metric), ahead, called[second.name]
        )
    few = len(level) <= 3
    tied = listing([called[name] for name in level]) if few else Markup("{} others").format(len(level))
    return Markup("{}, but this test cannot tell it from {}").format(reaches, tied)


def notes(comparison: Comparison, missing: Sequence[str] = (), stale: Sequence[str] = ()) -> list[Text]:
    """List failures, choices at the edge of the sweep, and limits of the conclusion."""
    found = [Text(f"{comparison.progress}; the others follow.", "alarm")] if comparison.progress else []
    found += [*_trouble(comparison), *_edges(comparison)]
    if len(comparison.seeds) == 1:
        seed = "One seed only: the intervals cover the choice of test examples, not that of the seed."
        found.append(Text(seed))
    called = names(comparison)
    for recipe in comparison.recipes:
        name = called[recipe.name]
        if recipe.forced:
            found.append(Text(Markup("{} was forced: {}.").format(name, recipe.forced), "alarm"))
        if recipe.unheard:
            found.append(Text(Markup("{}: {}.").format(name, recipe.unheard), "alarm"))
    for entry in comparison.failed:
        run, _, reason = entry.partition(":")
        link = Markup('Run <a href="#run-{0}">{0}</a> ended in an error').format(run.strip())
        found.append(Text(link + (Markup(": {}").format(reason.strip()) if reason.strip() else ""), "alarm"))
    if missing:
        text = f"{count(len(missing), 'run folder')} could not be read, so their curves are missing: "
        found.append(Text(Markup.escape(text) + listing(missing), "alarm"))
    if stale:
        text = f"{count(len(stale), 'stale run')}, made by older code; today's would give other numbers: "
        links = listing(Markup('<a href="#run-{0}">{0}</a>').format(run) for run in stale)
        found.append(Text(Markup.escape(text) + links, "alarm"))
    return found


def _beaten(comparison: Comparison, best: str, other: str) -> bool:
    d = difference(comparison, best, other)
    return d is not None and d.significant and comparison.headline.better(d.delta.value, 0.0)


def lead(comparison: Comparison) -> Markup:
    """Describe the difference between the two best recipes; empty if there are fewer."""
    ranked = ranking(comparison)
    if len(ranked) < 2:
        return Markup("")
    (best, _), (second, _), *_ = ranked
    called = names(comparison)
    d = difference(comparison, best.name, second.name)
    if d is None:
        return Markup("No significance was computed between {} and {}: their order may be chance.").format(
            called[best.name], called[second.name]
        )
    metric = comparison.headline
    return Markup("{} minus {}: {} {}, 95% interval {}; {} after correction for {}, {}.").format(
        called[best.name],
        called[second.name],
        signed(d.delta.value, metric),
        metric.label,
        interval(d.delta, metric, sign=True),
        p_value(d.p_corrected),
        count(len(comparison.differences), "comparison"),
        "significant" if d.significant else "not significant",
    )


def _trouble(comparison: Comparison) -> list[Text]:
    """Write one note per recipe with a run that did not train, and one for all the others."""
    called = names(comparison)
    found: list[Text] = []
    fine = []
    for recipe in comparison.recipes:
        parts = []
        for state in ("stuck", "diverged", IGNORES_SOURCE, "failed"):
            rates = [rate(t.lr) for t in recipe.trials if t.outcome == state]
            if rates:
                verb = "was stuck" if state == "stuck" else state
                parts.append(Markup("{} at {}").format(verb, listing(rates)))
        bad = [o for o in recipe.outcomes if o != "trained"]
        if bad and not (len(bad) == len(recipe.outcomes) and parts):
            parts.append(
                Markup("at the chosen {}, {} of {} seeds did not train").format(
                    rate(recipe.lr), len(bad), len(recipe.outcomes)
                )
            )
        if not parts:
            fine.append(called[recipe.name])
            continue
        good = [rate(t.lr) for t in recipe.trials if t.outcome == "trained"]
        end = Markup("; it trained at {}").format(listing(good)) if good else Markup(": nowhere did it train")
        found.append(Text(Markup("{} {}{}.").format(called[recipe.name], listing(parts), end), "alarm"))
    if fine:
        number = len(comparison.lrs)
        several = "both" if number == 2 else f"all {number}"
        every = "the learning rate tried" if number == 1 else f"{several} learning rates"
        found.append(Text(Markup("{} trained at {}.").format(listing(fine), every)))
    return found


def _edges(comparison: Comparison) -> list[Text]:
    called, lrs = names(comparison), comparison.lrs
    found: list[Text] = []
    if len(lrs) < 2:
        return found
    for edge, side, more in ((max(lrs), "largest", "larger"), (min(lrs), "smallest", "smaller")):
        there = [called[r.name] for r, _ in ranking(comparison) if r.lr == edge]
        if there:
            form = "{} did best at the {} learning rate tried, {}; a {} one may be better still."
            found.append(Text(Markup(form).format(listing(there), side, rate(edge), more)))
    return found
