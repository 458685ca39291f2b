"""The comparison's sentences on its page, with links, and the notes below them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from markupsafe import Markup

from normlab.comparison.result import Comparison, choose, learnt
from normlab.config.outcome import IGNORES_SOURCE
from normlab.config.units import count, rate
from normlab.report.page import Text

VERBS: Final = {"stuck": "was stuck", IGNORES_SOURCE: "ignored its source"}
"""What a run with an outcome did, where that is not the outcome's own word."""


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


def linked(comparison: Comparison, sentence: str) -> Markup:
    """Return one of the comparison's sentences with every recipe's name underlined and linked."""
    called = names(comparison)
    either = "|".join(re.escape(name) for name in sorted(called, key=len, reverse=True))
    parts = re.split(rf"(?<![\w+/:])({either})(?![\w+/:])", sentence) if called else [sentence]
    return Markup("").join(called.get(part, part) for part in parts)


def sentence(comparison: Comparison, said: str) -> Markup:
    """Return a sentence with a capital letter, unless it begins with a recipe's name, and a full stop."""
    begins = any(said.startswith(r.name) for r in comparison.recipes)
    return linked(comparison, (said if begins else said[:1].upper() + said[1:]) + ".")


def notes(comparison: Comparison, missing: Sequence[str] = (), stale: Sequence[str] = ()) -> list[Text]:
    """List failures, choices at the edge of the sweep, and limits of the conclusion."""
    found = [Text(f"{comparison.progress}; the others follow.", "alarm")] if comparison.progress else []
    found += [*_trouble(comparison), *_edges(comparison)]
    called = names(comparison)
    for recipe in comparison.recipes:
        name = called[recipe.name]
        if recipe.forced:
            found.append(Text(Markup("{} was forced: {}.").format(name, recipe.forced), "alarm"))
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


def _trouble(comparison: Comparison) -> list[Text]:
    """Write one note per recipe that did not train everywhere, and one for all the others."""
    called = names(comparison)
    found: list[Text] = []
    fine = []
    for recipe in comparison.recipes:
        parts = []
        for state in dict.fromkeys(t.outcome for t in recipe.trials if not learnt(t.outcome)):
            rates = [rate(t.lr) for t in recipe.trials if t.outcome == state]
            parts.append(Markup("{} at {}").format(VERBS.get(state, state), listing(rates)))
        if recipe.trained < len(recipe.outcomes):
            chosen = Markup(
                "at the chosen {} its seeds ended so: {}" if recipe.trials else "at {} its seeds ended so: {}"
            )
            parts.append(chosen.format(rate(recipe.lr), recipe.states))
        if parts:
            found.append(Text(Markup("{} {}.").format(called[recipe.name], listing(parts)), "alarm"))
        else:
            fine.append(called[recipe.name])
        if recipe.trials and choose(recipe.trials) != recipe.lr:
            form = "The rate of {} was chosen by dev {}; by dev loss it would have been {}."
            by = comparison.rate_metric.label
            found.append(
                Text(Markup(form).format(called[recipe.name], by, rate(choose(recipe.trials))), "alarm")
            )
    if fine:
        number = len(comparison.lrs)
        several = "both" if number == 2 else f"all {number}"
        every = "the learning rate tried" if number == 1 else f"{several} learning rates"
        found.append(Text(Markup("{} trained at {}, and with every seed.").format(listing(fine), every)))
    return found


def _edges(comparison: Comparison) -> list[Text]:
    called, lrs = names(comparison), comparison.lrs
    found: list[Text] = []
    if len(lrs) < 2:
        return found
    for edge, side, more in ((max(lrs), "largest", "larger"), (min(lrs), "smallest", "smaller")):
        there = [called[r.name] for r in comparison.ranked if r.trained and r.lr == edge]
        if there:
            form = "{} did best at the {} learning rate tried, {}; a {} one may be better still."
            found.append(Text(Markup(form).format(listing(there), side, rate(edge), more)))
    return found
