"""What a comparison found, in sentences: the terminal, JSON, page and Python object all show just these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from normlab.base.metric import Metric
from normlab.base.units import count, p_value
from normlab.judging.difference import Difference
from normlab.judging.statistics import LEVEL, MOST_SEEDS, fisher

FEW = 4
"""If there are more names than this, their number is given instead."""


class Contender(Protocol):
    """One of the things that are compared, such as a recipe."""

    @property
    def name(self) -> str: ...

    @property
    def trained(self) -> int:
        """The number of seeds that trained."""
        ...

    @property
    def ended(self) -> int:
        """The number of seeds whose run has an outcome."""
        ...

    def value(self, metric: Metric) -> float | None:
        """The mean score; None if no seed trained."""
        ...


class Standings(Protocol):
    """All that are compared, and what is known of their pairs."""

    @property
    def headline(self) -> Metric:
        """The metric by which they are ranked."""
        ...

    @property
    def noun(self) -> str:
        """What is compared: ``recipe``, ``change``."""
        ...

    @property
    def ranked(self) -> Sequence[Contender]:
        """All of them, the best first."""
        ...

    @property
    def seeds(self) -> Sequence[int | str]: ...

    @property
    def margin(self) -> float:
        """The smallest difference that matters."""
        ...

    @property
    def differences(self) -> Sequence[Difference]: ...


def of_difference(difference: Difference, standings: Standings) -> str:
    """Return the answer about two recipes."""
    a, b, delta, metric = difference.a, difference.b, difference.delta, standings.headline
    if delta is None or delta.low is None or delta.high is None or difference.p is None:
        few = f"{_seeds_in_words(len(standings.seeds))} cannot tell {a} from {b}"
        if difference.seeds > 1:
            return f"{few}: they differ by the same at all {difference.seeds} seeds, without any spread"
        common = "both trained at 1 seed" if difference.seeds else "no seed trained with both"
        return f"{few}: {common}, and a comparison takes two, better five"
    low, value, high = (metric.signed(v) for v in (delta.low, delta.value, delta.high))
    shown = f"difference {value}, 95% interval {low} to {high}, {p_value(difference.p)}"
    if difference.answer == "better":
        ahead, behind = (a, b) if metric.better(delta.value, 0.0) else (b, a)
        return f"{ahead} is better than {behind} by at least {metric.amount(delta.least)} ({shown})"
    if difference.answer == "equal":
        return f"no difference larger than {metric.amount(delta.largest)} between {a} and {b} ({shown})"
    effect, needed = difference.effect or standings.margin, difference.seeds_needed
    is_seen = effect > standings.margin
    if needed is None:
        sought = "one as small as that seen" if is_seen else f"one of {metric.amount(effect)}"
        takes = f"to show {sought} takes more than {MOST_SEEDS:,} seeds"
    else:
        seen = ", as large as that seen," if is_seen else ""
        takes = f"to show one of {metric.amount(effect)}{seen} takes about {needed} seeds"
    return f"{_seeds_in_words(difference.seeds)} cannot tell {a} from {b} ({shown}); {takes}"


def of_training(a: Contender, b: Contender, p: float, settles: int | None) -> str:
    """Say whether one recipe trains more often than the other; empty if both train equally often."""
    if a.trained * b.ended == b.trained * a.ended:
        return ""
    more, less = (a, b) if a.trained * b.ended > b.trained * a.ended else (b, a)
    counts = f"{more.trained} of {count(more.ended, 'seed')} against {less.trained} of {less.ended}"
    if p < LEVEL:
        return f"{more.name} trains more often than {less.name}: {counts} ({p_value(p)})"
    until = f"; with {settles} seeds and the same shares they would" if settles else ""
    return f"{counts} do not show that {more.name} trains more often than {less.name} ({p_value(p)}){until}"


def findings(standings: Standings) -> tuple[str, ...]:
    """Return what was found, the headline first."""
    noun, number = standings.noun, len(standings.ranked)
    if not number:
        return (f"No {noun} is finished yet",)
    trained = [recipe for recipe in standings.ranked if recipe.trained]
    if not trained:
        none = f"The {noun} did not train" if number == 1 else f"None of the {number} {noun}s trained"
        return (f"{none} at any of the learning rates",)
    best = trained[0]
    others = [difference for difference in standings.differences if best.name in (difference.a, difference.b)]
    headline = f"{best.name} {_reaches(best, standings.headline)}{_standing(best, others, standings)}"
    return (headline, *_open(best, others, standings), *_chances(standings))


def _reaches(recipe: Contender, metric: Metric) -> str:
    mean = recipe.value(metric)
    often = f"trained at {recipe.trained} of {count(recipe.ended, 'seed')}"
    if mean is None:
        return often
    reaches = f"reaches {metric.shown(mean)} {metric.label}"
    if recipe.trained < recipe.ended:
        return f"{often} and {reaches} there"
    return f"{reaches} with one seed" if recipe.ended == 1 else f"{reaches}, the mean of {recipe.ended} seeds"


def _standing(best: Contender, others: Sequence[Difference], standings: Standings) -> str:
    """How the best recipe compares with the others, in one clause for each kind of answer."""
    metric = standings.headline
    never = {recipe.name for recipe in standings.ranked if not recipe.trained}
    ahead = [d for d in others if d.answer == "better" and _winner(d, metric) == best.name]
    behind = [d for d in others if d.answer == "better" and d not in ahead]
    often = [d for d in others if d not in ahead and (d.p_trains or 1.0) < LEVEL]
    rest = [d for d in others if d not in often]
    unable = [d for d in rest if _other(d, best.name) in never]
    equal = [d for d in rest if d.answer == "equal"]
    still_open = [d for d in rest if d.answer == "open" and d not in unable]

    def others_in(differences: Iterable[Difference]) -> str:
        return _listing(_other(d, best.name) for d in differences)

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
    if still_open:
        clauses.append(
            f"{_seeds_in_words(len(standings.seeds)).lower()} cannot tell it from {others_in(still_open)}"
        )
    if unable:
        clauses.append(f"no seed of {others_in(unable)} trained")
    return "".join(f"; {clause}" for clause in clauses)


def _open(best: Contender, others: Sequence[Difference], standings: Standings) -> list[str]:
    """Say how many seeds would settle what is open about the best recipe."""
    needed = max((d.seeds_needed or 0 for d in others if d.answer == "open"), default=0)
    if not needed:
        return []
    settles = f"About {needed} seeds for each {standings.noun} would settle what is open about {best.name}"
    return [f"{settles}; so far there are {len(standings.seeds)}"]


def _chances(standings: Standings) -> list[str]:
    """Say whether so many seeds can possibly show that one recipe trains more often than another."""
    seeds, recipes = len(standings.seeds), len(standings.ranked)
    pairs = recipes * (recipes - 1) // 2
    shares = {recipe.trained / recipe.ended for recipe in standings.ranked if recipe.ended}
    is_shown = any((difference.p_trains or 1.0) < LEVEL for difference in standings.differences)
    if len(shares) < 2 or is_shown:
        return []
    least = next(n for n in range(2, MOST_SEEDS) if pairs * fisher((n, n), (0, n)) < LEVEL)
    if least <= seeds:
        return [f"How often the {standings.noun}s train does not differ by more than chance"]
    never = f"no difference in how often {recipes} {standings.noun}s train can be significant"
    return [f"With {count(seeds, 'seed')} {never}; with {least} all against none would be"]


def _winner(d: Difference, metric: Metric) -> str:
    return d.a if d.delta and metric.better(d.delta.value, 0.0) else d.b


def _other(d: Difference, name: str) -> str:
    return d.b if d.a == name else d.a


def _listing(items: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; if there are many, their number."""
    parts = list(items)
    if len(parts) > FEW:
        return f"{len(parts)} others"
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _seeds_in_words(seeds: int) -> str:
    words = {0: "No seed", 1: "One seed", 2: "Two seeds", 3: "Three seeds", 4: "Four seeds", 5: "Five seeds"}
    return words.get(seeds, f"{seeds} seeds")
