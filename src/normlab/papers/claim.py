"""Claims: the assertions of a paper as tests on measured numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import inf, isclose, isfinite, log, sqrt
from typing import Any, Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["agrees", "disagrees", "undecided", "not run"]
VERDICTS: Final[tuple[Verdict, ...]] = ("disagrees", "undecided", "not run", "agrees")
"""Verdicts in the order in which they decide: a whole agrees only if each of its parts does."""
POWER: Final = 0.8
"""The probability that ``Claim.runs_to_decide`` runs decide a claim."""
MOST_RUNS: Final = 1_000_000
"""A claim that needs more runs than this is too close to its bound for any number of runs."""
LEAST_RUNS: Final = 3
"""A mean over fewer runs decides nothing: two say nothing of their distribution."""


@dataclass(frozen=True)
class Measure:
    """A measured number with its 95% interval: the number itself if nothing was drawn at random."""

    value: float
    low: float
    high: float
    runs: int = 0
    """The number of independent runs behind the interval; 0 if nothing was drawn, or nobody counted."""
    share: bool = False
    """Whether it is a share of the runs, with the exact interval of Clopper and Pearson (1934)."""

    @classmethod
    def exact(cls, value: float) -> Measure:
        """Return a number without spread: measured again, it would be the same."""
        return cls(value, value, value)

    def columns(self, name: str) -> dict[str, float]:
        """Return the columns of a row: the value under a name, then the ends of its interval."""
        return {name: self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Claim:
    """The assertion that a measure lies between two bounds.

    One bound is a one-sided test at a level of 2.5%. Two bounds are a test of equivalence: the whole interval
    has to lie between them. Raises ValueError for a claim that nothing could contradict.
    """

    says: str
    """The assertion in words, naming what is compared."""
    measure: str
    """The name that a reproduction gives to the number."""
    at_least: float = -inf
    at_most: float = inf
    published: str = ""
    """The number or formula that the paper prints for this, if any."""
    derived: str = ""
    """How the bounds follow from what is printed, if they are not printed themselves."""
    convention: str = ""
    """How the paper's word is read as a number, if it prints none: "multiple magnitudes: at least 10
    times". The number is ours, and the page shows for which numbers the verdict would differ.
    """
    check: str = ""
    """Why the claim cannot fail: it holds by construction, or with much slack. A check tests the measurement,
    not the paper, and is not counted among the verdicts.
    """
    needs: str = ""
    """The hardware or data that gives the measure if this machine and its text cannot: without the measure,
    the claim is undecided, not merely not run.
    """

    part_of: str = ""
    """A name shared by claims that are parts of one: they count once, when all of them are decided."""
    until: float | None = None
    """The other end of the range in which the bound of a convention may reasonably lie: the claim is decided
    if its verdict is the same at both ends. For two bounds around 1, such as 1/2 and 2, it is the upper one
    of another such pair.
    """

    def content(self) -> dict[str, Any]:
        """Return what decides the verdict and whether it counts, as plain data: all but the words beside it
        and all default values, so a new field changes no claim that leaves it out.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("says", "published")}
        return {name: value for name, value in own.items() if value not in ("", inf, -inf, None)}

    def __post_init__(self) -> None:
        if not (isfinite(self.at_least) or isfinite(self.at_most)) or self.at_least > self.at_most:
            raise ValueError(
                f"the claim {self.says!r} allows {self.at_least} to {self.at_most}, which decides nothing; "
                "give at_least, at_most or both, the smaller one first"
            )
        around_1 = isclose(self.at_least * self.at_most, 1) and (self.until or 0) > 1
        if self.until is not None and not self._one_bound() and not around_1:
            raise ValueError(
                f"the claim {self.says!r} has the bounds {self.at_least} and {self.at_most} and until "
                f"{self.until}; until is the range of a single bound, or, above 1, of two whose product is 1"
            )

    def verdict(self, measures: Mapping[str, Measure]) -> Verdict:
        """Return ``agrees`` if the whole interval is within the bounds, ``disagrees`` if it is all outside,
        ``undecided`` if it is on both sides or not a number, or needs more than was at hand, and ``not run``
        if nothing was measured.
        """
        if self.measure not in measures:
            return "undecided" if self.needs else "not run"
        found = measures[self.measure]
        if 0 < found.runs < LEAST_RUNS and not found.share:
            return "undecided"
        at_both_ends = {_verdict(found, low, high) for low, high in self._bounds()}
        return at_both_ends.pop() if len(at_both_ends) == 1 else "undecided"

    def _bounds(self) -> list[tuple[float, float]]:
        """Return the bounds, and those at the other end of their range."""
        if self.until is None:
            other = self.at_least, self.at_most
        elif self._one_bound():
            other = (-inf, self.until) if isfinite(self.at_most) else (self.until, inf)
        else:
            other = 1 / self.until, self.until
        return [(self.at_least, self.at_most), other]

    def _one_bound(self) -> bool:
        return not (isfinite(self.at_least) and isfinite(self.at_most))

    def allowed(self) -> str:
        """Return the bounds in words."""
        first, other = map(_range, self._bounds())
        return first if first == other else f"{first}; decided only if {other} gives the same verdict"

    def turning(self, found: Measure) -> str:
        """Say for which bounds the verdict on this measure would differ."""
        if isfinite(self.at_least) and isfinite(self.at_most):
            return f"agrees with bounds that enclose {found.low:.4g} to {found.high:.4g}"
        if isfinite(self.at_least):
            return f"agrees with a bound up to {found.low:.4g}, disagrees with one above {found.high:.4g}"
        return f"agrees with a bound from {found.high:.4g} on, disagrees with one below {found.low:.4g}"

    def runs_to_decide(self, measures: Mapping[str, Measure]) -> int | None:
        """Return the number of runs that would decide the claim with a probability of 80%, if the measure and
        the spread of the runs stay the same; None if the claim is not undecided, if the number of runs is not
        known, or if no number of runs would do.
        """
        found = measures.get(self.measure)
        if found is None or found.runs < 2 or self.verdict(measures) != "undecided":
            return None
        inside = (b for b in (self.at_least, self.at_most) if found.low <= b <= found.high)
        fewest = LEAST_RUNS if found.runs < LEAST_RUNS else MOST_RUNS + 1
        needed = max((_runs_to_tell(found, bound) for bound in inside), default=fewest)
        return needed if needed <= MOST_RUNS else None


def at_least(measure: str, bound: float, says: str = "", **basis: Any) -> Claim:
    """Claim that a measure is at least ``bound``; ``basis`` holds other fields of ``Claim``."""
    return Claim(says, measure, at_least=bound, **basis)


def at_most(measure: str, bound: float, says: str = "", **basis: Any) -> Claim:
    """Claim, as with ``at_least``, that a measure is at most ``bound``."""
    return Claim(says, measure, at_most=bound, **basis)


def within(measure: str, low: float, high: float, says: str = "", **basis: Any) -> Claim:
    """Claim, as with ``at_least``, that a measure is from ``low`` to ``high``."""
    return Claim(says, measure, at_least=low, at_most=high, **basis)


positive: Final = partial(at_least, bound=0.0, derived="an order is the sign of the difference")
negative: Final = partial(at_most, bound=0.0, derived="an order is the sign of the difference")
above_one: Final = partial(at_least, bound=1.0, derived="an order is a ratio above or below 1")
below_one: Final = partial(at_most, bound=1.0, derived="an order is a ratio above or below 1")
mostly: Final = partial(at_least, bound=0.5, derived="one is better than the other if it is so at most seeds")
fails: Final = partial(at_most, bound=0.5, convention="it fails if most of its runs do")
trains: Final = partial(at_least, bound=0.5, convention="it trains if most of its runs do")
"""Claims for papers that say which of two is better, or whether a model trains."""


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if isfinite(low) and isfinite(high):
        return f"{low:g} to {high:g}" if low < high else f"{low:g}"
    return f"at least {low:g}" if isfinite(low) else f"at most {high:g}"


def _verdict(found: Measure, low: float, high: float) -> Verdict:
    if low <= found.low and found.high <= high:
        return "agrees"
    return "disagrees" if found.high < low or found.low > high else "undecided"


def _runs_to_tell(found: Measure, bound: float) -> int:
    """Return the fewest runs that tell a measure from a bound; above ``MOST_RUNS`` if so many are too few."""
    decides = _share_decides(found, bound) if found.share else _mean_decides(found, bound)
    runs = found.runs + 1
    while runs <= MOST_RUNS and not decides(runs):
        runs += max(1, runs // 50)
    return runs


def _share_decides(found: Measure, bound: float) -> Callable[[int], bool]:
    """Return whether a number of runs puts such a share's exact interval beside the bound, with ``POWER``."""
    from scipy.stats import binom  # a list of papers does not wait for it

    # An end of the interval is at the bound if the bound's own tail is 2.5%.
    if found.value > bound:
        return lambda runs: bool(binom.sf(binom.isf(0.025, runs, bound), runs, found.value) >= POWER)
    return lambda runs: bool(binom.cdf(binom.ppf(0.025, runs, bound) - 1, runs, found.value) >= POWER)


def _mean_decides(found: Measure, bound: float) -> Callable[[int], bool]:
    scale = _symmetric_scale(found)
    half = abs(scale(found.high if bound >= found.value else found.low) - scale(found.value))
    distance = abs(scale(bound) - scale(found.value))
    one = half * sqrt(found.runs) / _quantile(0.975, found.runs)
    return lambda runs: distance * sqrt(runs) >= one * (_quantile(0.975, runs) + _quantile(POWER, runs))


def _symmetric_scale(found: Measure) -> Callable[[float], float]:
    """Return the scale on which the interval was computed: x, ln x of a ratio, or ln(1 − x) of an R²."""
    scales: list[Callable[[float], float]] = [float]
    scales += [log] if found.low > 0 else []
    scales += [lambda x: log(1 - x)] if found.high < 1 else []
    for scale in scales:
        low, value, high = (scale(x) for x in (found.low, found.value, found.high))
        if isclose(high - value, value - low, rel_tol=1e-3):
            return scale
    return float


def _quantile(probability: float, runs: int) -> float:
    from scipy.special import stdtrit  # a list of papers does not wait for it

    return float(stdtrit(runs - 1, probability))


def whole(parts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim of several parts: open while one of them is, else as in ``together``."""
    given = set(parts)
    return next((v for v in ("undecided", "not run") if v in given), together(given))


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine verdicts into the first of ``VERDICTS`` that is among them; ``not run`` if there is none."""
    given = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in given), "not run")
