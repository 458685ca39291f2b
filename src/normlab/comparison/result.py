"""The result of ``normlab compare`` as data: written after each recipe, drawn by the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from normlab.config.metric import NLL, Metric, deciding
from normlab.config.units import count

NO_OUTCOME = ("new", "running", "done", "interrupted", "failed")
"""States of a run that has not ended by itself: it says nothing of its recipe."""


def learnt(outcome: str) -> bool:
    """Whether a run with this outcome trained."""
    return outcome.startswith("trained")


TEST_IS_DEV = (
    "The dev text serves as the test text, too. The scores called test were measured on the text on which "
    "learning rates and checkpoints were chosen, and flatter every recipe."
)


@dataclass(frozen=True)
class Interval:
    """A point estimate with a 95% interval; without ends where there are too few runs for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def least(self) -> float:
        """The smallest size that the interval holds, if it leaves out 0."""
        return min(abs(self.low or 0.0), abs(self.high or 0.0))

    @property
    def largest(self) -> float:
        """The largest size that the interval holds."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))


@dataclass(frozen=True)
class Trial:
    """One learning rate of one recipe, run with the seed of the sweep."""

    lr: float
    run: str
    dev: dict[str, float]
    """The best dev scores by metric name; empty: it was never validated."""
    outcome: str


def choose(trials: Sequence[Trial]) -> float:
    """Return the learning rate with the lowest dev loss per token among the runs that trained, or among all
    if none did.

    Ties go to the smaller rate.
    """

    def merit(trial: Trial) -> tuple[bool, float, float]:
        return learnt(trial.outcome), NLL.merit(trial.dev.get(NLL.name)), -trial.lr

    return max(trials, key=merit).lr


@dataclass(frozen=True)
class RecipeResult:
    """One recipe: its sweep over learning rates, and its seeds at the chosen one."""

    name: str
    resolves_to: str
    """One line: placement, norm, embedding, scheme, schedule."""
    trials: tuple[Trial, ...]
    """The sweep, with a seed that is not reported; empty where there was one rate and no choice."""
    lr: float
    """The learning rate that the sweep chose."""
    runs: tuple[str, ...]
    """Run ids at the chosen learning rate, in the order of ``Comparison.seeds``."""
    outcomes: tuple[str, ...] = ()
    trains: Interval | None = None
    """The share of runs that trained; None where none has ended."""
    scores: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Test scores by metric name, one for each seed; None for a run without."""
    means: dict[str, Interval] = field(default_factory=dict)
    """By metric name the mean over the seeds that trained, on the metric's scale, with an interval from two
    seeds on.
    """
    train_seconds: float = 0.0
    """Median over the runs at the chosen learning rate."""
    total_seconds: float = 0.0
    """Over every run of the recipe, the sweep included."""
    forced: str = ""
    """Why a source does not define this combination, where it was forced."""
    explained: dict[str, str] = field(default_factory=dict)
    """Label to text of everything that it resolves to; empty: not recorded."""

    def value(self, metric: Metric) -> float | None:
        """The mean test score; None where no seed trained."""
        mean = self.means.get(metric.name)
        return mean.value if mean else None

    def by_seed(self, metric: Metric) -> str:
        """The score of each seed, in brackets where the run did not train: ``33.1, (0.4), 33.3``."""
        scores = self.scores.get(metric.name, (None,) * len(self.runs))
        shown = [metric.shown(score) or "–" for score in scores]
        return ", ".join(
            text if learnt(outcome) else f"({text})"
            for text, outcome in zip(shown, self.outcomes, strict=True)
        )

    @property
    def trained(self) -> int:
        """The number of seeds that trained."""
        return sum(map(learnt, self.outcomes))

    @property
    def ended(self) -> int:
        """The number of seeds whose run has an outcome; one that failed by an error has none."""
        return sum(outcome not in NO_OUTCOME for outcome in self.outcomes)

    @property
    def states(self) -> str:
        """The outcomes with the number of seeds of each: ``trained (2), stuck (1)``."""
        return ", ".join(f"{state} ({number})" for state, number in Counter(self.outcomes).items())


@dataclass(frozen=True)
class Difference:
    """Two recipes compared: how good each is when it trains, how often it trains, and their very models."""

    a: str
    b: str
    seeds: int
    """The number of seeds at which both trained."""
    answer: str
    """``better`` (``a`` is, or ``b``), ``equal`` (no difference that matters), or ``open`` (too few seeds).
    """
    sentence: str = ""
    """The answer in words."""
    delta: Interval | None = None
    """The headline score of ``a`` minus that of ``b`` with an interval that holds for all pairs at once; None
    where both trained at fewer than two seeds.
    """
    p: float | None = None
    """Two-sided, corrected for the number of pairs; below 0.05 exactly where the interval leaves out 0."""
    effect: float | None = None
    """Where the answer is open, the difference that is looked for: the one seen, or ``Comparison.margin`` if
    that is larger.
    """
    seeds_needed: int | None = None
    """The number of seeds that would show ``effect``; None if that takes more than a thousand."""
    p_trains: float | None = None
    """The p that both train equally often (Fisher's exact test), corrected for the number of pairs."""
    trains_sentence: str = ""
    """How often each trains, in words; empty where there is no difference."""
    models: float | None = None
    """The difference of the mean scores of these models, as it is."""
    p_models: float | None = None
    """The p of that difference by exchanging outputs, about these models alone and not corrected."""


@dataclass(frozen=True)
class Sample:
    """A test example with each recipe's output (``Comparison.sample_seed``, chosen learning rate)."""

    source: str
    reference: str
    """Empty where no output is the right one."""
    outputs: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Everything the page shows that is not in the run folders themselves."""

    title: str
    command: str
    """What to type to do it again."""
    date: str
    machine: str
    task: str
    metrics: tuple[Metric, ...]
    """The task's; the first is the headline, by which recipes are ranked and compared."""
    best_by: str
    """Name of the dev metric by which checkpoints were chosen."""
    data: dict[str, str]
    """Facts in words: pairs, vocabulary, corpus, unigram entropy."""
    seeds: tuple[int, ...]
    """The reported seeds, which no choice has looked at."""
    lrs: tuple[float, ...]
    recipes: tuple[RecipeResult, ...]
    samples: tuple[Sample, ...]
    margin: float
    """The smallest difference of the headline that matters; a smaller one counts as none."""
    differences: tuple[Difference, ...] = ()
    sentences: tuple[str, ...] = ()
    """What was found, the headline first: pages and terminals say these sentences."""
    sweep_seed: int | None = None
    """The seed of the sweep over learning rates; None: there was no choice."""
    rate_by: str = NLL.name
    """Name of the dev metric by which learning rates were chosen."""
    sample_seed: int | None = None
    """The seed whose outputs are the samples."""
    open_recipes: tuple[str, ...] = ()
    """Recipes whose runs have not all ended."""
    failed: tuple[str, ...] = ()
    """Run ids that ended in an error, with the reason after a colon."""
    test_is_dev: bool = False
    """No test text was given: the scores called test are of the dev text, on which choices were made."""
    unigram_entropy_nats: float | None = None
    """Entropy of the training tokens that are predicted; None: not recorded."""
    signatures: dict[str, str] = field(default_factory=dict)
    """By metric name the exact version of a score, where its library gives one."""
    sample_labels: tuple[str, str] = ("source", "reference")
    """The names of a sample's two given texts."""

    overlap: dict[str, float] = field(default_factory=dict)
    """The shares of dev and test that stand in another text as well, by ``test in training`` and so on."""

    @property
    def seen_before(self) -> str:
        """In words, that test text was read in training or for choices; empty if none of it was."""
        said = [TEST_IS_DEV] if self.test_is_dev else []
        for where in ("training", "dev")[: 1 if self.test_is_dev else 2]:
            if share := self.overlap.get(f"test in {where}"):
                said.append(f"{100 * share:.1f}% of the test sentences stand in the {where} text as well.")
        return " ".join(said)

    @property
    def headline(self) -> Metric:
        """The metric by which recipes are ranked and compared."""
        return self.metrics[0]

    @property
    def dev_metric(self) -> Metric:
        """The dev metric by which checkpoints were chosen."""
        return deciding(self.metrics, self.best_by)

    @property
    def rate_metric(self) -> Metric:
        """The dev metric by which learning rates were chosen."""
        return deciding((NLL, *self.metrics), self.rate_by)

    @property
    def ranked(self) -> tuple[RecipeResult, ...]:
        """The recipes, those that trained at every seed first, then by their mean test score."""

        def place(r: RecipeResult) -> tuple[bool, float, int]:
            return 0 < r.trained == r.ended, self.headline.merit(r.value(self.headline)), r.trained

        return tuple(sorted(self.recipes, key=place, reverse=True))

    @property
    def tested(self) -> tuple[Metric, ...]:
        """The metrics that some recipe has on the test text."""
        return tuple(m for m in self.metrics if any(m.name in r.scores for r in self.recipes))

    @property
    def validated(self) -> tuple[Metric, ...]:
        """The metrics of validations that pages draw: the one of choices, and NLL."""
        return tuple({metric.name: metric for metric in (self.dev_metric, NLL)}.values())

    @property
    def progress(self) -> str:
        """``3 of 4 recipes finished``; empty once all are."""
        done = len(self.recipes)
        whole = done + len(self.open_recipes)
        return f"{done} of {count(whole, 'recipe')} finished" if self.open_recipes else ""
