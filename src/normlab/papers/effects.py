"""Effects: what a regime says about two of its cells, or about one, as a number with an interval; no torch.

Each is a function of a ``Regime`` and of keywords, registered under its name for ``findings/*.toml``. Cells
are compared within seeds, on a scale without edges (``MetricScale``), so no interval leaves the metric's
range. A run that failed without a score, such as one that diverged before its first validation, has the worst
one: papers print such runs as 0 BLEU or as a failure, and leave none out. Where a metric has no worst value,
as a loss, the run's own worst on dev stands for it. Without that there is no effect, and ``UnmeasuredError``
names the run. The regime's other cells help to estimate how much a pair varies; a cell that cannot be
measured is left out of that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from normlab.base.io import validated
from normlab.base.metric import NLL, Metric
from normlab.base.registry import Registry
from normlab.errors import UserError, nearest
from normlab.papers.estimate import Array, Estimate, jackknife, log_slope, mean, mean_ratio
from normlab.papers.regimes import Curve, Regime, Row, Run

CellNames: TypeAlias = str | Sequence[str]
"""A cell, or several whose mean on the metric's scale is taken."""
Value: TypeAlias = str | int | float
T = TypeVar("T")
BLEU: Final = Metric("bleu", "BLEU", least=0.0, most=100.0)
ACCURACY: Final = Metric("accuracy", "accuracy", "%", least=0.0, most=100.0)
BITS_PER_BYTE: Final = Metric("bits_per_byte", "bits per byte", higher_is_better=False, digits=3, least=0.0)
METRICS: Final = {metric.name: metric for metric in (BLEU, NLL, BITS_PER_BYTE, ACCURACY)}
"""Metrics of the tasks, whose own modules need torch."""
RATIO: Final = "×"
SHARE: Final = "of the runs"
STEPS: Final = "of the logged steps"
MEASURED: Final = ("gradients", "dependency", "updates")
"""What ``end_measures`` measures of weights."""


@dataclass(frozen=True)
class Effect:
    """A registered function of a regime."""

    name: str
    measure: Callable[..., Estimate]
    equal: float | None
    """The value of no difference, such as 0, or 1 for a ratio; None for a number that compares nothing."""

    def __call__(self, regime: Regime, arguments: Mapping[str, Any]) -> Estimate:
        """Measure it. Raises UserError for an argument that the function does not take, or lacks, or that is
        not what its annotation says.
        """
        known = [name for name in inspect.signature(self.measure).parameters if name != "regime"]
        for name in arguments:
            if name not in known:
                raise UserError(f"{self.name} takes no {name!r}{nearest(name, known)}")
        defaults = self.with_defaults({})
        required = [name for name in known if name not in defaults]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise UserError(f"{self.name} needs {' and '.join(missing)}; give {', '.join(required)}")
        return validated(self.measure)(regime, **arguments)

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the defaults of those that are not given."""
        parameters = inspect.signature(self.measure).parameters
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        return {**defaults, **arguments}


EFFECTS: Final[Registry[Effect]] = Registry("effect")
F = TypeVar("F", bound=Callable[..., Estimate])


def effect(equal: float | None = None) -> Callable[[F], F]:
    """Register a function of a regime under its name, with the value that means no difference."""
    return EFFECTS.register_made(lambda measure: Effect(measure.__name__, measure, equal))


def names(cells: CellNames) -> tuple[str, ...]:
    """Return the names of one cell, or of several."""
    return (cells,) if isinstance(cells, str) else tuple(cells)


def _metric(regime: Regime, name: str, *, on_dev: bool = False) -> Metric:
    """The metric of a name. Raises UserError for one that no run of the regime has: its runs would all count
    as equally bad.
    """
    if name not in METRICS:
        raise UserError(f"an effect knows no metric {name!r}{nearest(name, METRICS)}")
    kept = {metric for run in regime.runs for metric in (run.dev if on_dev else run.scores)}
    if kept and name not in kept:
        has = ", ".join(sorted(kept & METRICS.keys())) or "none that effects know"
        place = "on dev" if on_dev else "on test"
        raise UserError(f"no run of the regime {regime.name} has {name} {place}; metric is one of: {has}")
    return METRICS[name]


UNITS: Final = {NLL.name: "nats", BITS_PER_BYTE.name: "bits", ACCURACY.name: "points"}
"""The units of differences of a metric, for metrics whose unit is not their label."""


def _unit(metric: Metric) -> str:
    return UNITS.get(metric.name, metric.label)


def _by_seed(regime: Regime, *sides: CellNames) -> list[list[list[Run]]]:
    """The runs of each side at every seed that all of their cells have: seed, side, cell."""
    cells = [[regime.cell(name) for name in names(side)] for side in sides]
    seeds = [set(cell) for side in cells for cell in side]
    return [[[cell[seed] for cell in side] for side in cells] for seed in sorted(set.intersection(*seeds))]


def _pairs(regime: Regime, of: str, over: str) -> list[tuple[Run, Run]]:
    """The runs of two cells at every seed that both have."""
    return [(first, second) for (first,), (second,) in _by_seed(regime, of, over)]


NOTHING: Final = Estimate(math.nan, -math.inf, math.inf)
"""The estimate of what no run says anything about yet."""


def _mean(values: Sequence[float], unit: str) -> Estimate:
    return (mean(values) if values else NOTHING).of_unit(unit)


def _mean_ratio(values: Sequence[float]) -> Estimate:
    return (mean_ratio(values) if values else NOTHING).of_unit(RATIO)


class UnmeasuredError(UserError):
    """A run keeps nothing that an effect could read, such as a score, and nothing can stand for it."""


def _ratio(of: float, over: float) -> float:
    """The ratio of two positive numbers. Raises UnmeasuredError for others: a geometric mean has none."""
    if not (0 < of < math.inf and 0 < over < math.inf):
        raise UnmeasuredError(f"a ratio needs two positive numbers, got {of:g} and {over:g}")
    return of / over


def score_or_worst(run: Run, metric: Metric) -> float:
    """The test score of a run. One that failed without any has the metric's worst, or if the metric has none,
    the run's own worst on dev. Raises UserError if there is neither, and for another run without a score.
    """
    score = run.scores.get(metric.name)
    if score is not None and math.isfinite(score):
        return score
    worst = _worst(metric)
    if worst is None:
        worst = max((value for _, value in _dev(run, metric.name)), default=None)
    if worst is None or not _failed_without(run, metric):
        raise _no_score(run, metric, "test")
    return worst


def _worst(metric: Metric) -> float | None:
    return metric.least if metric.higher_is_better else metric.most


def _failed_without(run: Run, metric: Metric) -> bool:
    """Whether a run failed without a test score; one that was cut short has not failed."""
    score = run.scores.get(metric.name)
    failed = bool(run.outcome) and not run.trained
    return failed and (score is None or not math.isfinite(score))


def _no_score(run: Run, metric: Metric, place: str) -> UnmeasuredError:
    return UnmeasuredError(
        f"run {run.id} of {run.cell} keeps no {metric.name} on {place}, and nothing stands for it"
    )


def _mean_on_scale(scores: Iterable[float], metric: Metric) -> float:
    """The mean of scores, each carried to the metric's scale."""
    return float(np.mean(_scale(metric).values(np.array(list(scores)))))


def _test_on_scale(runs: Iterable[Run], metric: Metric) -> float:
    """The mean of test scores on the metric's scale."""
    return _mean_on_scale((score_or_worst(run, metric) for run in runs), metric)


def _scale(metric: Metric) -> Any:
    from normlab.judging.statistics import MetricScale  # `normlab --help` does not wait for scipy

    return MetricScale(metric)


def _of_metric(on_scale: Estimate, metric: Metric, back: Callable[[Array], Array]) -> Estimate:
    """Carry an estimate on a metric's scale back to scores."""
    return on_scale.mapped(lambda value: float(back(np.array(value)))).of_unit(_unit(metric))


def _difference(
    regime: Regime, of: CellNames, over: CellNames, metric: Metric, value: Callable[[Sequence[Run]], float]
) -> Estimate:
    """The mean difference of two sides within seeds, as one of scores around the mean of all of them.

    ``value`` gives a side's runs at one seed a number on the metric's scale, or raises UnmeasuredError. The
    interval is the one that ``compare`` would give if it had a single pair to decide: a few seeds hardly tell
    how much a pair varies, so its variance is moderated by the typical one of all pairs of the regime's
    cells.
    """
    from normlab.judging.statistics import contrasts  # `normlab --help` does not wait for scipy

    sides = [names(of), names(over)]
    others = [(cell,) for cell in regime.cells if not any(cell in side for side in sides)]
    of_others = _by_side(regime, others, lambda runs: _value_or_nan(value, runs))
    values = np.concatenate([_by_side(regime, sides, value), of_others])
    pair = values[:2, np.isfinite(values[:2]).all(axis=0)]
    if not pair.size:
        return NOTHING.of_unit(_unit(metric))
    compared = contrasts(values)
    delta, seeds = float(compared.delta[0]), pair.shape[1]
    if seeds < 2:
        moved = Estimate.of_too_few(delta, seeds)
    else:
        # differences that do not vary at all have no margin
        margin = float(np.nan_to_num(compared.margin_of_one[0]))
        moved = Estimate(delta, delta - margin, delta + margin, seeds)
    centre = np.array(pair.mean())
    return _of_metric(moved, metric, lambda shift: _scale(metric).difference(centre, shift))


def _value_or_nan(value: Callable[[Sequence[Run]], float], runs: Sequence[Run]) -> float:
    """The value of runs; NaN if they have none."""
    try:
        return value(runs)
    except UnmeasuredError:
        return math.nan


def _by_side(
    regime: Regime, sides: Sequence[tuple[str, ...]], value: Callable[[Sequence[Run]], float]
) -> Array:
    """The value of each side at each seed, `[sides, seeds]`; NaN where a cell of the side has no run."""
    cells = [[regime.cell(name) for name in side] for side in sides]
    seeds = sorted({run.seed for run in regime.runs})
    values = np.full((len(sides), len(seeds)), np.nan)
    for row, side in enumerate(cells):
        for column, seed in enumerate(seeds):
            if all(seed in cell for cell in side):
                values[row, column] = value([cell[seed] for cell in side])
    return values


@effect()
def score(regime: Regime, of: str, metric: str = "bleu") -> Estimate:
    """The mean test score of a cell."""
    shown = _metric(regime, metric)
    values = [_test_on_scale(runs, shown) for (runs,) in _by_seed(regime, of)]
    if not values:
        return NOTHING.of_unit(_unit(shown))
    return _of_metric(mean(values), shown, _scale(shown).scores)


@effect(0.0)
def difference(regime: Regime, of: CellNames, over: CellNames, metric: str = "bleu") -> Estimate:
    """The test score of ``of`` minus that of ``over``, within seeds."""
    shown = _metric(regime, metric)
    return _difference(regime, of, over, shown, lambda runs: _test_on_scale(runs, shown))


@effect(0.0)
def best_difference(regime: Regime, of: CellNames, over: CellNames, metric: str = "bleu") -> Estimate:
    """The best test score of any cell in ``of`` minus that of any in ``over``, within seeds. The best of
    several favours the side with more cells, so it is used only where that works against the finding.
    """
    shown = _metric(regime, metric)

    def best(runs: Sequence[Run]) -> float:
        return _mean_on_scale([max((score_or_worst(run, shown) for run in runs), key=shown.sort_key)], shown)

    return _difference(regime, of, over, shown, best)


@effect(0.0)
def tuned_difference(
    regime: Regime, of: Sequence[str], over: Sequence[str], metric: str = "bleu"
) -> Estimate:
    """``difference`` of two recipes, each at the better of its rates: of its cells, the one whose runs have
    the lower mean of their best dev NLL. A rate at which a run fails before its first validation is the worse
    one.
    """

    def better(cells: Sequence[str]) -> str:
        best = {cell: [_best_nll(run) for run in regime.cell(cell).values()] for cell in cells}
        return min(cells, key=lambda cell: fmean(best[cell]) if best[cell] else math.inf)

    return difference(regime, better(of), better(over), metric)


def _best_nll(run: Run) -> float:
    if _failed_without(run, NLL) and not _dev(run, NLL.name):
        return math.inf
    return min(map(_value, _kept_dev(run, NLL)))


@effect()
def trains(regime: Regime, of: CellNames) -> Estimate:
    """The share of the runs of some cells that train, with its exact interval. A run that was cut short has
    no outcome, and does not count.
    """
    return _share([run.trained for run in _ended(regime, of)])


def _ended(regime: Regime, of: CellNames) -> list[Run]:
    """The runs of some cells that were not cut short."""
    return [run for cell in names(of) for run in regime.cell(cell).values() if run.outcome]


def _share(counted: Sequence[bool]) -> Estimate:
    """The share of those that count, with its exact interval (Clopper and Pearson 1934)."""
    from normlab.judging.statistics import share  # `normlab --help` does not wait for scipy

    if not counted:
        return Estimate(math.nan, 0.0, 1.0, share=True, unit=SHARE)
    ends = share(sum(counted), len(counted))
    low, high = ends.low or 0.0, ends.high or 0.0
    return Estimate(ends.value, low, high, len(counted), share=True, unit=SHARE)


@effect()
def fails(regime: Regime, of: CellNames, least: float, metric: str = "bleu") -> Estimate:
    """The share of the runs of some cells that do not train, or end below a least test score, with its exact
    interval. A run that was cut short has no outcome, and does not count.
    """
    shown = _metric(regime, metric)
    runs = _ended(regime, of)
    return _share([not run.trained or shown.better(least, score_or_worst(run, shown)) for run in runs])


@effect(1.0)
def steps_ratio(regime: Regime, of: str, over: str) -> Estimate:
    """The first step at which the NLL of ``of`` on dev is as low as that of ``over`` ever is, over the step
    at which ``over`` is that good, as a geometric mean over seeds. A run of ``of`` that never gets there
    counts with its last step, which is too small, so the interval then has no upper end.
    """
    ratios: list[float] = []
    all_arrived = True
    for first, second in _pairs(regime, of, over):
        curve = _kept_dev(first, NLL)
        step, best = min(_kept_dev(second, NLL), key=_value)
        reached = next((at for at, nll in curve if nll <= best), None)
        if reached is None:
            all_arrived = False
            reached = curve[-1][0]
        ratios.append(_ratio(reached, step))
    ratio = _mean_ratio(ratios)
    return ratio if all_arrived else replace(ratio, high=math.inf)


@effect(0.0)
def dev_difference(
    regime: Regime, of: str, over: str, metric: str = "nll", step: int = 0, share: float = 1.0
) -> Estimate:
    """The dev score of ``of`` minus that of ``over`` at the last validation up to ``step``; without a step,
    up to a share of each run's own training. A run that had failed by then has its worst score.
    """
    shown = _metric(regime, metric, on_dev=True)
    longest = max((curve[-1][0] for run in regime.runs if (curve := _dev(run, metric))), default=0)

    def reached(runs: Sequence[Run]) -> float:
        return _mean_on_scale([_dev_at(run, shown, step, share, longest) for run in runs], shown)

    return _difference(regime, of, over, shown, reached)


@effect(0.0)
def best_on_dev(regime: Regime, of: str, over: str, metric: str = "bleu") -> Estimate:
    """The best dev score of ``of`` in its training minus that of ``over``."""
    shown = _metric(regime, metric, on_dev=True)

    def best_of(curve: Curve) -> float:
        return max(map(_value, curve), key=shown.sort_key)

    def best(runs: Sequence[Run]) -> float:
        return _mean_on_scale([_dev_or_worst(run, shown, best_of) for run in runs], shown)

    return _difference(regime, of, over, shown, best)


@effect(0.0)
def dev_rise(regime: Regime, of: str, metric: str = "nll") -> Estimate:
    """How far the dev score of a cell rises from the first validation to the last that each run reached."""
    shown = _metric(regime, metric, on_dev=True)
    curves = [_kept_dev(run, shown) for run in regime.cell(of).values()]
    return _mean([curve[-1][1] - curve[0][1] for curve in curves], _unit(shown))


@effect(0.0)
def training_rise(regime: Regime, of: str) -> Estimate:
    """How far the training NLL of a cell is, at the last step of each run, above its first dev NLL, for runs
    whose first training NLL was not kept.
    """
    rises = [
        run.last_loss - _kept_dev(run, NLL)[0][1]
        for run in regime.cell(of).values()
        if run.last_loss is not None
    ]
    return _mean(rises, _unit(NLL))


@effect()
def last_on_dev(regime: Regime, of: str, metric: str = "bleu") -> Estimate:
    """The mean dev score of a cell at the last validation that each of its runs reached."""
    shown = _metric(regime, metric, on_dev=True)
    runs = list(regime.cell(of).values())
    if not runs:
        return NOTHING.of_unit(_unit(shown))
    last = min((curve[-1][0] for run in runs if (curve := _dev(run, metric))), default=0)
    scores = [_dev_or_worst(run, shown, lambda curve: _at(curve, last, 1.0)) for run in runs]
    values = _scale(shown).values(np.array(scores))
    return _of_metric(mean(values.tolist()), shown, _scale(shown).scores)


@effect(1.0)
def gradient_ratio(regime: Regime, of: str, over: str, after: int) -> Estimate:
    """The median norm of the gradient of ``of`` over that of ``over``, after a step such as the warm-up's
    last.
    """

    def middle(run: Run) -> float:
        return median(_logged_norms(run, after))

    return _mean_ratio([_ratio(middle(first), middle(second)) for first, second in _pairs(regime, of, over)])


def _norms(run: Run, after: int) -> list[float]:
    """The norms of a run's gradient after a step."""
    return [norm for step, norm in run.gradients if step > after]


def _logged_norms(run: Run, after: int) -> list[float]:
    """The norms of a run's gradient after a step. Raises UnmeasuredError if it logged none."""
    norms = _norms(run, after)
    if not norms:
        raise UnmeasuredError(f"run {run.id} of {run.cell} logged no gradient norm after step {after}")
    return norms


SPIKE: Final = 3.0
"""A gradient norm this many times the median of the steps around it is a spike."""
AROUND: Final = 25
"""How many logged steps before and after a step its gradient norm is compared with."""


@effect()
def spikes(regime: Regime, of: str, after: int) -> Estimate:
    """The share of a cell's logged steps after a step whose gradient norm is a spike, as a mean over runs:
    spikes come in bursts, so the steps of a run are not independent.
    """
    by_run: list[list[bool]] = []
    for run in regime.cell(of).values():
        norms = _norms(run, after)
        around = [median(norms[max(0, i - AROUND) : i + AROUND + 1]) for i in range(len(norms))]
        if norms:
            by_run.append([norm > SPIKE * middle for norm, middle in zip(norms, around, strict=True)])
    of_runs = _mean([fmean(counted) for counted in by_run], STEPS)
    if not of_runs.has_ends:
        return of_runs
    # Runs that all have no spike do not show that there never is one: no interval is narrower than that of
    # independent steps.
    of_steps = _share([is_spike for counted in by_run for is_spike in counted])
    low, high = min(of_runs.low, of_steps.low), max(of_runs.high, of_steps.high)
    return replace(of_runs, low=max(low, 0.0), high=min(high, 1.0))


@effect(1.0)
def spread_ratio(regime: Regime, of: str, over: str, after: int) -> Estimate:
    """How noisy the gradient norm of ``of`` is over that of ``over``, after a step: the distance between its
    quartiles over its median, which neither the size of the norm nor a few spikes change.
    """

    def spread(run: Run) -> float:
        with np.errstate(invalid="ignore"):  # of infinite norms the quartiles are no numbers
            low, middle, high = np.percentile(_logged_norms(run, after), (25, 50, 75))
        return _ratio(float(high - low), float(middle))

    return _mean_ratio([_ratio(spread(first), spread(second)) for first, second in _pairs(regime, of, over)])


@effect(1.0)
def penalty_ratio(regime: Regime, of: Sequence[str], over: Sequence[str], metric: str) -> Estimate:
    """How much worse the first cell of ``of`` is than its second, over the same of ``over``, within seeds.

    Raises UserError if the first cell of a side is not the worse one at some seed: there is no ratio then.
    """
    shown = _metric(regime, metric)
    ratios = []
    for sides in _by_seed(regime, of, over):
        first, second = (_loss(worse, better, shown) for worse, better in sides)
        ratios.append(first / second)
    return _mean_ratio(ratios)


def _loss(worse: Run, better: Run, metric: Metric) -> float:
    """By how much a run's test score is worse than another's."""
    lost = metric.sort_key(score_or_worst(better, metric)) - metric.sort_key(score_or_worst(worse, metric))
    if lost <= 0:
        raise UserError(f"{worse.cell} loses nothing to {better.cell} at seed {worse.seed}")
    return lost


@effect()
def gains(regime: Regime, of: str, over: str, metric: str, by: float = 0.0) -> Estimate:
    """The share of seeds at which the test score of ``of`` is better than that of ``over`` by more than
    ``by``, with its exact interval.
    """
    shown = _metric(regime, metric)
    gained = [
        shown.sort_key(score_or_worst(first, shown)) - shown.sort_key(score_or_worst(second, shown)) > by
        for first, second in _pairs(regime, of, over)
    ]
    return _share(gained)


@effect(0.0)
def swept_loss(regime: Regime, of: str, rate: float) -> Estimate:
    """How much worse the dev NLL of a cell is at a rate than at the best one that its sweep tried, with one
    run at each.
    """
    swept = {row["rate"]: row["nll"] for row in _rows(regime, "rates", {"cell": of})}
    if rate not in swept:
        tried = ", ".join(f"{one:g}" for one in swept)
        raise UserError(f"the sweep of {of} has no rate {rate:g}; it has {tried}")
    # a run that diverged has no loss, and is not the best one
    best = min((loss for loss in swept.values() if math.isfinite(loss)), default=math.nan)
    return Estimate.of_too_few(swept[rate] - best, 1).of_unit("nats")


@effect(1.0)
def rate_ratio(regime: Regime, of: str, over: str) -> Estimate:
    """The rate that a sweep chose for ``of`` over the one that it chose for ``over``, with one run at each
    rate.
    """
    for cell in (of, over):
        if cell not in regime.rates:
            raise UserError(f"no sweep chose a rate for {cell!r}{nearest(cell, regime.rates)}")
    return Estimate.of_too_few(regime.rates[of].value / regime.rates[over].value, 1).of_unit(RATIO)


@effect()
def measure(regime: Regime, of: str, unit: str = "") -> Estimate:
    """What a study measured and kept under a name."""
    if of not in regime.measures:
        raise UserError(f"the regime {regime.name} has no measure {of!r}{nearest(of, regime.measures)}")
    return regime.measures[of].of_unit(unit)


@effect(1.0)
def measured_ratio(regime: Regime, of: str) -> Estimate:
    """A ratio that a study measured and kept under a name."""
    return measure(regime, of, RATIO)


@effect(1.0)
def quotient(regime: Regime, of: str, over: str) -> Estimate:
    """One ratio that a study measured and kept over another, measured apart: the squares of the two margins
    of their logarithms add up.
    """
    first, second = measure(regime, of), measure(regime, over)
    # a measure that nothing was drawn for has no runs, and does not hide how few the other one has
    runs = min((ratio.runs for ratio in (first, second) if ratio.runs), default=0)
    if not (first.has_ends and second.has_ends):
        return Estimate.of_too_few(first.value / second.value, runs).of_unit(RATIO)
    middle = math.log(first.value / second.value)
    margin = math.hypot(*(math.log(ratio.high / ratio.low) / 2 for ratio in (first, second)))
    both = Estimate(middle, middle - margin, middle + margin, runs)
    return both.mapped(math.exp).of_unit(RATIO)


@effect(1.0)
def last_over_first(
    regime: Regime, table: str, y: str, of: Mapping[str, Value], x: str = "layer"
) -> Estimate:
    """The column ``y`` of a study's table at the largest ``x`` over that at the smallest, as a geometric mean
    over seeds; ``of`` has the values of other columns.
    """
    curves = _curves(regime, table, y, x, of)
    return _mean_ratio([_ratio(curve[-1][1], curve[0][1]) for curve in curves])


@effect(1.0)
def row_ratio(
    regime: Regime, table: str, y: str, of: Mapping[str, Value], over: Mapping[str, Value]
) -> Estimate:
    """The column ``y`` of a study's table in the rows ``of`` over that in the rows ``over``, within seeds."""
    first, second = (_column(regime, table, y, side) for side in (of, over))
    both = sorted(first.keys() & second.keys())
    return _mean_ratio([_ratio(first[seed], second[seed]) for seed in both])


@effect()
def exponent(regime: Regime, table: str, y: str, x: str, of: Mapping[str, Value]) -> Estimate:
    """The exponent of the column ``y`` over ``x`` in a study's table, as a mean over seeds."""
    curves = _curves(regime, table, y, x, of)
    return log_slope([step for step, _ in curves[0]], ([value for _, value in curve] for curve in curves))


@effect()
def law_preference(regime: Regime, table: str, y: str, x: str, of: Mapping[str, Value]) -> Estimate:
    """By how much AIC prefers a line of the column ``y`` in log ``x`` to one in ``x``, on the mean over seeds
    of a study's table. Both lines have two parameters, so their AICs differ by the number of points times the
    logarithm of the ratio of their residual squares.
    """
    curves = _curves(regime, table, y, x, of)
    steps = np.array([step for step, _ in curves[0]], float)

    def preference(values: Array) -> float:
        middle = values.mean(axis=0)
        of_line, of_log = (_squares_left(at, middle) for at in (steps, np.log(steps)))
        return len(steps) * math.log(of_line / of_log)

    return jackknife([[value for _, value in curve] for curve in curves], preference).of_unit("AIC")


def _squares_left(x: Array, y: Array) -> float:
    """The sum of the squares that the least-squares line of y over x leaves."""
    return float(np.square(y - np.polyval(np.polyfit(x, y, 1), x)).sum())


@effect(1.0)
def layers_ratio(regime: Regime, of: str, stack: str, matrix: str, step: int | None = None) -> Estimate:
    """The norm of the mean gradient of a kind of matrix in the last layer over that in the first, on the
    weights of a step, or on the best ones on dev, as a geometric mean over seeds.
    """
    ratios = []
    for run in regime.cell(of).values():
        layers = _place(_weights(run, step), "gradients", "mean_grad_l2", stack)
        if layers:
            values = _matrix(layers, matrix)
            ratios.append(_ratio(values[-1], values[0]))
    return _mean_ratio(ratios)


@effect(1.0)
def gradients_after(regime: Regime, of: str, stack: str, matrix: str, step: int) -> Estimate:
    """The norm of the mean gradient of a kind of matrix after a step over that before the first one, as a
    geometric mean over layers, and then over seeds.
    """
    ratios = []
    for run in regime.cell(of).values():
        before, after = (_place(_weights(run, at), "gradients", "mean_grad_l2", stack) for at in (0, step))
        if before and after:
            pairs = zip(_matrix(after, matrix), _matrix(before, matrix), strict=True)
            ratios.append(math.exp(fmean(math.log(_ratio(late, early)) for late, early in pairs)))
    return _mean_ratio(ratios)


@effect(1.0)
def matrices_ratio(
    regime: Regime,
    of: str,
    measure: Sequence[str],
    matrices: Sequence[str],
    against: Sequence[str],
    step: int | None = None,
) -> Estimate:
    """The norms of some kinds of matrices, or of their gradients or updates, over those of others, as a
    geometric mean over layers, stacks and steps, and then over seeds; ``measure`` names the entry of the
    measured weights. With a ``step`` it is read of the weights of that step alone.
    """
    ratios = []
    for run in regime.cell(of).values():
        logs = [
            _mean_log(stack, matrices) - _mean_log(stack, against)
            for entry in run.measured
            if step in (None, entry["step"])
            for stack in (_place(entry, *measure) or {}).values()
        ]
        if logs:
            ratios.append(math.exp(fmean(logs)))
    return _mean_ratio(ratios)


def _mean_log(stack: Mapping[str, Sequence[float]], kinds: Sequence[str]) -> float:
    return fmean(math.log(_ratio(value, 1.0)) for kind in kinds for value in _matrix(stack, kind))


def _matrix(stack: Mapping[str, Sequence[float]], kind: str) -> Sequence[float]:
    """The values of a kind of matrix, first layer first. Raises UserError for one that there is not."""
    if kind not in stack:
        raise UserError(f"there is no matrix {kind!r}{nearest(kind, stack)}")
    return stack[kind]


@effect(1.0)
def own_share(regime: Regime, of: str, stack: str, step: int | None = None) -> Estimate:
    """How much a sublayer leans on its own branch, as a multiple of an even share: the mean of i β_ii² over
    the upper half of a stack, on the weights of a step, or on the best ones on dev.
    """
    shares = [_own_share(run, stack, step) for run in regime.cell(of).values()]
    values = [share for share in shares if share is not None]
    return _mean(values, "× an even share")


@effect(1.0)
def own_share_ratio(regime: Regime, of: str, over: str, stack: str, step: int | None = None) -> Estimate:
    """``own_share`` of one cell over that of another, within seeds."""
    ratios = []
    for first, second in _pairs(regime, of, over):
        above, below = (_own_share(run, stack, step) for run in (first, second))
        if above is not None and below is not None:
            ratios.append(_ratio(above, below))
    return _mean_ratio(ratios)


def _own_share(run: Run, stack: str, step: int | None) -> float | None:
    """The mean of i β_ii² over the upper half of a stack; None if it was not measured on these weights."""
    columns = _place(_weights(run, step), "dependency", stack)
    if columns is None:
        return None
    shares = columns["i_beta_sq"]
    return fmean(shares[len(shares) // 2 :])


def _weights(run: Run, step: int | None) -> Row | None:
    """What was measured on the weights of a step, or on the best ones; None if nothing was."""
    chosen = [entry for entry in run.measured if (entry["best"] if step is None else entry["step"] == step)]
    return chosen[0] if chosen else None


def _place(entry: Row | None, *keys: str) -> Any:
    """What an entry of measured weights has under nested keys; None without an entry, and for a measure that
    was refused, or not taken. Raises UserError for a key that the measure does not have.
    """
    measure, *inside = keys
    if measure not in MEASURED:
        raise UserError(f"no weights have a measure {measure!r}{nearest(measure, MEASURED)}")
    if entry is None or measure not in entry:
        return None
    inner: Any = entry[measure]
    for key in inside:
        if key not in inner:
            raise UserError(f"{measure} has no {key!r}{nearest(key, inner)}")
        inner = inner[key]
    return inner


def _rows(regime: Regime, table: str, of: Mapping[str, Value]) -> list[Row]:
    """The rows of a study's table that have these values. Raises UserError if there are none."""
    if table not in regime.tables:
        raise UserError(f"the regime {regime.name} has no table {table!r}{nearest(table, regime.tables)}")
    rows = [row for row in regime.tables[table] if all(row.get(key) == value for key, value in of.items())]
    if not rows:
        raise UserError(f"the table {table} of {regime.name} has no rows with {dict(of)}")
    return rows


def _curves(regime: Regime, table: str, y: str, x: str, of: Mapping[str, Value]) -> list[Curve]:
    """A study's column ``y`` over ``x``, for each seed. Raises UserError if seeds have several rows of an
    ``x``, or different ones.
    """
    curves: dict[int, dict[int, float]] = {}
    for row in _rows(regime, table, of):
        curve = curves.setdefault(row["seed"], {})
        if row[x] in curve:
            raise _ambiguous(table, row["seed"], f"{x} {row[x]}")
        curve[row[x]] = row[y]
    points: list[Curve] = [sorted(curves[seed].items()) for seed in sorted(curves)]
    steps = [[step for step, _ in curve] for curve in points]
    if any(of_seed != steps[0] for of_seed in steps):
        raise UserError(f"the seeds of the table {table} differ in {x}")
    return points


def _column(regime: Regime, table: str, y: str, of: Mapping[str, Value]) -> dict[int, float]:
    """A study's column ``y`` by seed. Raises UserError if a seed has several rows."""
    values: dict[int, float] = {}
    for row in _rows(regime, table, of):
        if row["seed"] in values:
            raise _ambiguous(table, row["seed"], "these values")
        values[row["seed"]] = row[y]
    return values


def _ambiguous(table: str, seed: int, which: str) -> UserError:
    return UserError(
        f"the table {table} has several rows with {which} for seed {seed}; name the value of one more column"
    )


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _dev(run: Run, metric: str) -> Curve:
    """The dev scores that a run keeps, without those that are not finite."""
    return [point for point in run.dev.get(metric, ()) if math.isfinite(_value(point))]


def _kept_dev(run: Run, metric: Metric) -> Curve:
    """A run's dev scores. Raises UserError if none were kept."""
    curve = _dev(run, metric.name)
    if not curve:
        raise _no_score(run, metric, "dev")
    return curve


def _dev_or_worst(run: Run, metric: Metric, read: Callable[[Curve], float]) -> float:
    """What is read of a run's dev scores; the metric's worst for a run that failed without any."""
    curve = _dev(run, metric.name)
    if curve:
        return read(curve)
    worst = _worst(metric)
    # of a run with a test score the dev scores were not kept, which does not make them bad
    if worst is None or not _failed_without(run, metric):
        raise _no_score(run, metric, "dev")
    return worst


def _dev_at(run: Run, metric: Metric, step: int, share: float, longest: int) -> float:
    """A run's dev score at the last validation up to a step, or up to a share of its training if the step is
    0; the worst score of a run that had failed by then. ``longest`` is the length of the regime's trainings.
    """
    curve = _dev(run, metric.name)
    has_failed = bool(run.outcome) and not run.trained
    # a run that diverged ends early, so its own length is not that of the training
    asked = step or share * longest
    if curve and has_failed and curve[-1][0] < min(asked, longest):
        worst = _worst(metric)
        return max(map(_value, curve)) if worst is None else worst
    return _dev_or_worst(run, metric, lambda scores: _at(scores, step, share))


def _at(curve: Curve, step: int, share: float) -> float:
    """The value at the last point up to a step, or up to a share of the training if the step is 0."""
    last = step or share * curve[-1][0]
    return next(value for at, value in reversed(curve) if at <= last or at == curve[0][0])
