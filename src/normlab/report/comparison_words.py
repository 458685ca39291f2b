"""The sentences of a comparison's page: its fixed words, names that link to runs, and notes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from normlab.base.metric import IGNORES_SOURCE
from normlab.base.units import count, rate
from normlab.lab.comparison.result import Comparison, RecipeResult, choose, has_trained
from normlab.report.page import Text, anchor, breakable

VERBS: Final = {"stuck": "was stuck", IGNORES_SOURCE: "ignored its source"}
"""What a run with an outcome did, if the outcome's own word does not say it."""


@cache
def words(noun: str) -> Mapping[str, Any]:
    """The words of the page that depend only on the noun of what is compared, from
    ``templates/comparison.toml``.
    """
    file = Path(__file__).with_name("templates") / "comparison.toml"
    text = file.read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{noun}", noun).replace("{Noun}", noun.capitalize()))


# ------------------------------------------------------------------------------------------- names, linked


def slug(name: str) -> str:
    """Return a recipe's anchor."""
    return f"recipe-{anchor(name)}"


def names(comparison: Comparison) -> dict[str, Markup]:
    """Return each recipe's name, underlined in its colour and linked to its runs."""
    form = Markup('<a class="recipe" href="#{}" style="text-decoration-color: var(--recipe-{})">{}</a>')
    return {
        recipe.name: form.format(slug(recipe.name), place, breakable(recipe.name))
        for place, recipe in enumerate(comparison.recipes)
    }


def linked(comparison: Comparison, sentence: str) -> Markup:
    """Return one of the comparison's sentences with every recipe's name underlined and linked."""
    links = names(comparison)
    if not links:
        return Markup("").join([sentence])
    # the longest first, because the name of a recipe may begin with that of another, as in pre and pre+warmup
    longest_first = sorted(links, key=len, reverse=True)
    either = "|".join(re.escape(name) for name in longest_first)
    # not inside another word; but a colon may end a clause after a name
    parts = re.split(rf"(?<![\w+/:])({either})(?![\w+/]|:\S)", sentence)
    return Markup("").join(links.get(part, part) for part in parts)


def sentence(comparison: Comparison, text: str) -> Markup:
    """Return a sentence with a capital letter, unless it begins with a recipe's name, and a full stop."""
    begins_with_name = any(text.startswith(recipe.name) for recipe in comparison.recipes)
    if not begins_with_name:
        text = text[:1].upper() + text[1:]
    return linked(comparison, f"{text}.")


def listing(items: Iterable[str]) -> Markup:
    """Join items: ``a``, ``a and b``, ``a, b and c``; plain strings are escaped."""
    parts = [Markup.escape(item) for item in items]
    if len(parts) < 2:
        return Markup("").join(parts)
    return Markup("{} and {}").format(Markup(", ").join(parts[:-1]), parts[-1])


# --------------------------------------------------------------------------------------------------- notes


def notes(comparison: Comparison, missing: Sequence[str] = (), stale: Sequence[str] = ()) -> Iterator[Text]:
    """Yield failures, choices at the edge of the sweep, and limits of the conclusion.

    Args:
        comparison: what the page is about.
        missing: ids of runs whose folders could not be read.
        stale: ids of runs that the current code would give other numbers for.
    """
    links = names(comparison)
    if comparison.progress:
        yield Text(f"{comparison.progress}; the others follow.", "alarm")
    yield from _notes_on_training(comparison, links)
    yield from _notes_on_edges(comparison, links)
    for recipe in comparison.recipes:
        if recipe.forced:
            yield Text(Markup("{} was forced: {}.").format(links[recipe.name], recipe.forced), "alarm")
    yield from _notes_on_runs(comparison, missing, stale)


def _notes_on_training(comparison: Comparison, links: Mapping[str, Markup]) -> Iterator[Text]:
    """Yield a note for each recipe that did not train everywhere, and one for all the others."""
    trained_everywhere = []
    for recipe in comparison.recipes:
        link = links[recipe.name]
        troubles = _troubles(recipe)
        if troubles:
            yield Text(Markup("{} {}.").format(link, listing(troubles)), "alarm")
        else:
            trained_everywhere.append(link)
        if recipe.trials:
            by_loss = choose(recipe.trials)
            if by_loss != recipe.lr:
                form = Markup("The rate of {} was chosen by dev {}; by dev loss it would have been {}.")
                yield Text(form.format(link, comparison.rate_metric.label, rate(by_loss)), "alarm")
    if trained_everywhere:
        form = Markup("{} trained at {}, and with every seed.")
        yield Text(form.format(listing(trained_everywhere), _every_rate(len(comparison.lrs))))


def _troubles(recipe: RecipeResult) -> list[Markup]:
    """Where a recipe did not train: by outcome, the rates of the sweep; and its seeds at the chosen rate."""
    troubles: list[Markup] = []
    outcomes = [trial.outcome for trial in recipe.trials if not has_trained(trial.outcome)]
    for outcome in dict.fromkeys(outcomes):
        rates = [rate(trial.lr) for trial in recipe.trials if trial.outcome == outcome]
        troubles.append(Markup("{} at {}").format(VERBS.get(outcome, outcome), listing(rates)))
    if recipe.trained < len(recipe.outcomes):
        place = "at the chosen {}" if recipe.trials else "at {}"
        form = Markup(f"has these outcomes {place}: {{}}")
        troubles.append(form.format(rate(recipe.lr), recipe.states))
    return troubles


def _every_rate(number: int) -> str:
    if number == 1:
        return "the learning rate tried"
    return "both learning rates" if number == 2 else f"all {number} learning rates"


def _notes_on_edges(comparison: Comparison, links: Mapping[str, Markup]) -> Iterator[Text]:
    """Yield a note on the recipes whose best rate is the largest that was tried, and one on the smallest."""
    swept = [recipe for recipe in comparison.ranked if recipe.trained and recipe.trials]
    form = Markup("{} did best at the {} learning rate tried, {}; a {} one may be better still.")
    for edge, side, beyond in ((max, "largest", "larger"), (min, "smallest", "smaller")):
        at_edge = [recipe for recipe in swept if recipe.lr == edge(trial.lr for trial in recipe.trials)]
        if at_edge:
            rates = " and ".join(dict.fromkeys(rate(recipe.lr) for recipe in at_edge))
            yield Text(form.format(listing(links[recipe.name] for recipe in at_edge), side, rates, beyond))


def _notes_on_runs(comparison: Comparison, missing: Sequence[str], stale: Sequence[str]) -> Iterator[Text]:
    """Yield what is wrong with runs: those that failed, those without a folder, and those of older code."""
    for run, reason in comparison.failed_runs.items():
        text = Markup('Run <a href="#run-{0}">{0}</a> ended in an error').format(run)
        yield Text(text + Markup(": {}").format(reason) if reason else text, "alarm")
    if missing:
        text = f"{count(len(missing), 'run folder')} could not be read, so their curves are missing: "
        yield Text(Markup.escape(text) + listing(missing), "alarm")
    if stale:
        text = f"{count(len(stale), 'stale run')}, made by older code; today's gives other numbers: "
        links = listing(Markup('<a href="#run-{0}">{0}</a>').format(run) for run in stale)
        yield Text(Markup.escape(text) + links, "alarm")
