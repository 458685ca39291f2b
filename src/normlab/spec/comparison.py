"""The result of ``normlab compare`` as data: written after each recipe, drawn by the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from normlab.spec.metric import NLL, Metric, deciding
from normlab.spec.units import count

MOSTLY = 0.5
"""A share of the outputs; that one of them has more is a failure."""


TEST_IS_DEV = (
    "The dev text serves as the test text, too. The scores called test were measured on the text on which "
    "learning rates and checkpoints were chosen, and flatter every recipe."
)


@dataclass(frozen=True)
class Interval:
    """A point estimate with a 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Trial:
    """One learning rate of one recipe, run with the first seed."""

    lr: float
    run: str
    dev: dict[str, float]
    """The best dev scores by metric name; empty: it was never validated."""
    outcome: str


@dataclass(frozen=True)
class RecipeResult:
    """One recipe: its sweep over learning rates, and its seeds at the chosen one."""

    name: str
    resolves_to: str
    """One line: placement, norm, embedding, scheme, schedule."""
    trials: tuple[Trial, ...]
    lr: float
    """The learning rate chosen on dev with the first seed."""
    runs: tuple[str, ...]
    """Run ids at the chosen learning rate, in the order of ``Comparison.seeds``."""
    outcomes: tuple[str, ...]
    scores: dict[str, float]
    """Test scores by metric name, the mean over the seeds that were tested; empty: none was."""
    intervals: dict[str, Interval]
    """By metric name the same mean with an interval over test examples (bootstrap) and seeds (Student's t),
    of the metrics whose statistics the task keeps for each example.
    """
    dev: dict[str, float]
    """Best dev scores by metric name, the mean over the seeds that were validated."""
    train_seconds: float
    """Median over the runs at the chosen learning rate."""
    total_seconds: float
    """Over every run of the recipe, the sweep included."""
    forced: str = ""
    """Why a source does not define this combination, where it was forced."""
    explained: dict[str, str] = field(default_factory=dict)
    """Label to text of everything that it resolves to; empty: not recorded."""
    repeated: tuple[float, ...] = ()
    """The share, 0 to 1, of each seed's outputs that its commonest output has; 0 where a line of the
    reference has as large a share. Empty: the task has no source that a model could ignore.
    """

    def value(self, metric: Metric) -> float | None:
        """The mean test score; None where no seed was tested."""
        interval = self.intervals.get(metric.name)
        return interval.value if interval else self.scores.get(metric.name)

    @property
    def unheard(self) -> str:
        """In words, that it answers most of the test text with one sentence; empty where no seed does."""
        shares = [share for share in self.repeated if share > MOSTLY]
        if not shares:
            return ""
        seeds = f"{len(shares)} of {count(len(self.repeated), 'seed')}"
        return (
            f"{seeds} gave at least {math.floor(100 * min(shares))}% of the test sentences one and the same "
            f"output, so the model does not read its source, whatever its score"
        )


@dataclass(frozen=True)
class Difference:
    """The headline score of ``a`` minus that of ``b``, paired over test examples; its interval includes the
    spread over seeds.
    """

    a: str
    b: str
    delta: Interval
    p: float
    """Two-sided, before correction."""
    p_corrected: float
    """Holm-corrected over all pairs of the comparison."""
    significant: bool
    """``p_corrected`` is below 0.05."""
    p_randomisation: float | None = None
    """Two-sided, before correction, by exchanging outputs: for these models alone, not for their recipes;
    None: the two do not have the same number of seeds.
    """


@dataclass(frozen=True)
class Sample:
    """A test example with each recipe's output (first seed, chosen learning rate)."""

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
    """Name of the dev metric by which learning rates and checkpoints were chosen."""
    data: dict[str, str]
    """Facts in words: pairs, vocabulary, corpus, unigram entropy."""
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    recipes: tuple[RecipeResult, ...]
    differences: tuple[Difference, ...]
    samples: tuple[Sample, ...]
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
        """The dev metric by which choices were made."""
        return deciding(self.metrics, self.best_by)

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
