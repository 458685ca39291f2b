"""What a comparison found, in sentences: the terminal, JSON, page and Python object all show just these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normlab.base.metric import Metric, ratio
from normlab.base.units import count, p_value
from normlab.lab.comparison.result import Comparison, RecipeDifference, RecipeResult
from normlab.lab.comparison.statistics import LEVEL, MOST_SEEDS, fisher

FEW = 4
"""If there are more names than this, their number is given instead."""


def of_difference(difference: RecipeDifference, comparison: Comparison) -> str:
    """Return the answer about two recipes."""
    a, b, delta, metric = difference.a, difference.b, difference.delta, comparison.headline
    if delta is None or delta.low is None or delta.high is None or difference.p is None:
        common = (
            f"both trained at {count(difference.seeds, 'seed')}"
            if difference.seeds
            else "no seed trained with both"
        )
        few = f"{_say(len(comparison.seeds))} cannot tell {a} from {b}"
        return f"{few}: {common}, and a comparison takes two, better five"
    low, value, high = (metric.signed(v) for v in (delta.low, delta.value, delta.high))
    shown = f"difference {value}, 95% interval {low} to {high}, {p_value(difference.p)}"
    if difference.answer == "better":
        ahead, behind = (a, b) if metric.better(delta.value, 0.0) else (b, a)
        return f"{ahead} is better than {behind} by at least {metric.amount(delta.least)} ({shown})"
    if difference.answer == "equal":
        return f"no difference larger than {metric.amount(delta.largest)} between {a} and {b} ({shown})"
    effect, needed = difference.effect or comparison.margin, difference.seeds_needed
    seen = ", as large as that seen," if effect > comparison.margin else ""
    enough = f"more than {MOST_SEEDS:,} seeds" if needed is None else f"about {needed} seeds"
    takes = f"to show one of {metric.amount(effect)}{seen} takes {enough}"
    return f"{_say(difference.seeds)} cannot tell {a} from {b} ({shown}); {takes}"


def of_costs(a: RecipeResult, b: RecipeResult) -> str:
    """Say how one recipe differs from another in parameters and FLOPs; empty if that is unknown."""
    if a.cost is None or b.cost is None:
        return ""
    parameters = ratio(a.cost.parameters, b.cost.parameters)
    flops = ratio(a.cost.flops, b.cost.flops)
    return f"{a.name} against {b.name}: parameters {parameters}, FLOPs {flops}"


def of_training(a: RecipeResult, b: RecipeResult, p: float, settles: int | None) -> str:
    """Say whether one recipe trains more often than the other; empty if both train equally often."""
    if a.trained * b.ended == b.trained * a.ended:
        return ""
    more, less = (a, b) if a.trained * b.ended > b.trained * a.ended else (b, a)
    counts = f"{more.trained} of {count(more.ended, 'seed')} against {less.trained} of {less.ended}"
    if p < LEVEL:
        return f"{more.name} trains more often than {less.name}: {counts} ({p_value(p)})"
    until = f"; with {settles} seeds and the same shares they would" if settles else ""
    return f"{counts} do not show that {more.name} trains more often than {less.name} ({p_value(p)}){until}"


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Return what was found, the headline first."""
    ranked = [r for r in comparison.ranked if r.trained]
    if not comparison.recipes:
        return (f"No {comparison.noun} is finished yet",)
    if not ranked:
        number = len(comparison.recipes)
        who = f"The {comparison.noun}" if number == 1 else f"None of the {number} {comparison.noun}s"
        which = f"{'did not train' if number == 1 else 'trained'} at any of the learning rates"
        return (f"{who} {which}",)
    best = ranked[0]
    reached = f"{best.name} {_reaches(best, comparison.headline)}"
    others = [d for d in comparison.differences if best.name in (d.a, d.b)]
    return (
        reached + _standing(best, others, comparison),
        *_open(best, others, comparison),
        *_chances(comparison),
    )


def _reaches(recipe: RecipeResult, metric: Metric) -> str:
    mean, often = recipe.value(metric), f"trained at {recipe.trained} of {count(recipe.ended, 'seed')}"
    if mean is None:
        return often
    reaches = f"reaches {metric.shown(mean)} {metric.label}"
    if recipe.trained < recipe.ended:
        return f"{often} and {reaches} there"
    return f"{reaches} with one seed" if recipe.ended == 1 else f"{reaches}, the mean of {recipe.ended} seeds"


def _standing(best: RecipeResult, others: Sequence[RecipeDifference], comparison: Comparison) -> str:
    """How the best recipe compares with the others, in one clause for each kind of answer."""
    metric = comparison.headline
    ahead = [d for d in others if d.answer == "better" and _winner(d, metric) == best.name]
    behind = [d for d in others if d.answer == "better" and d not in ahead]
    often = [d for d in others if d not in ahead and (d.p_trains or 1.0) < LEVEL]
    equal = [d for d in others if d.answer == "equal" and d not in often]
    never = {r.name for r in comparison.recipes if not r.trained}
    still = [d for d in others if d.answer == "open" and d not in often and _other(d, best.name) not in never]
    unable = [d for d in others if d not in often and _other(d, best.name) in never]

    def others_in(some: Iterable[RecipeDifference]) -> str:
        return _listing(_other(d, best.name) for d in some)

    clauses = []
    if ahead:
        least = min(d.delta.least for d in ahead if d.delta)
        clauses.append(f"it is better than {others_in(ahead)} by at least {metric.amount(least)}")
    if behind:
        clauses.append(f"{others_in(behind)} did better where it trained, but trained less often")
    if often:
        clauses.append(f"it trains more often than {others_in(often)}")
    if equal:
        most = max(d.delta.largest for d in equal if d.delta)
        clauses.append(f"there is no difference larger than {metric.amount(most)} from {others_in(equal)}")
    if still:
        clauses.append(f"{_say(len(comparison.seeds)).lower()} cannot tell it from {others_in(still)}")
    if unable:
        clauses.append(f"no seed of {others_in(unable)} trained")
    return "".join(f"; {clause}" for clause in clauses)


def _open(best: RecipeResult, others: Sequence[RecipeDifference], comparison: Comparison) -> list[str]:
    """Say how many seeds would settle what is open about the best recipe."""
    most = max((d.seeds_needed or 0 for d in others if d.answer == "open"), default=0)
    so_far, each = f"so far there are {len(comparison.seeds)}", f"seeds for each {comparison.noun}"
    settles = f"About {most} {each} would settle what is open about {best.name}; {so_far}"
    return [settles] if most else []


def _chances(comparison: Comparison) -> list[str]:
    """Say whether so many seeds can possibly show that one recipe trains more often than another."""
    seeds, recipes = len(comparison.seeds), len(comparison.recipes)
    pairs = recipes * (recipes - 1) // 2
    if len({r.trained / r.ended for r in comparison.recipes if r.ended}) < 2 or any(
        (d.p_trains or 1.0) < LEVEL for d in comparison.differences
    ):
        return []
    least = next(n for n in range(2, MOST_SEEDS) if pairs * fisher((n, n), (0, n)) < LEVEL)
    if least <= seeds:
        return [f"How often the {comparison.noun}s train does not differ by more than chance"]
    never = f"no difference in how often {recipes} {comparison.noun}s train can be significant"
    return [f"With {count(seeds, 'seed')} {never}; with {least} all against none would be"]


def _winner(d: RecipeDifference, metric: Metric) -> str:
    return d.a if d.delta and metric.better(d.delta.value, 0.0) else d.b


def _other(d: RecipeDifference, name: str) -> str:
    return d.b if d.a == name else d.a


def _listing(items: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; if there are many, their number."""
    parts = list(items)
    if len(parts) > FEW:
        return f"{len(parts)} others"
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _say(seeds: int) -> str:
    words = {0: "No seed", 1: "One seed", 2: "Two seeds", 3: "Three seeds", 4: "Four seeds", 5: "Five seeds"}
    return words.get(seeds, f"{seeds} seeds")
