"""What ``normlab compare`` is asked for and what it finds, as data: written after each recipe, and drawn by
the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from annotated_types import Ge, Lt

from normlab.base.io import Amount, Count, Positive, Size, no_flag, validated
from normlab.base.metric import NLL, Cost, Metric, selection_metric
from normlab.base.units import count
from normlab.errors import UserError
from normlab.judging.difference import Difference, Interval
from normlab.lab.config import OWN_TASK, Config, OptimConfig, TrainConfig
from normlab.lab.runs.folder import Status


@validated
@dataclass(frozen=True)
class CompareRequest:
    """Recipes to train at several learning rates with the sweep's seed, and at the best one with others.

    >>> normlab.CompareRequest(recipes=("post", "pre"), lrs=(1e-3,), seeds=3, base=config).seeds
    3
    """

    title: str = "Comparison"
    """Title of the page."""
    recipes: tuple[str, ...] = ("post", "post+warmup", "pre", "pre+fixnorm+scalenorm")
    """Names of recipes, such as post post+warmup enc:post/dec:pre; `normlab recipes` lists their parts."""
    setup: tuple[str, ...] = no_flag(())
    """Files of yours to compare instead of recipes, such as base.py change.py, or A=change.py with a short
    name. The setup() of each returns a normlab.Setup; all use the batches and dev batches of the first.
    """
    lrs: tuple[Positive, ...] = (1e-3, 2e-3)
    """Peak learning rates to try; each recipe's own is chosen by dev loss with the sweep's seed. With
    files the default is half, once and twice the rate that each file has.
    """
    seeds: Size = 5
    """Number of reported seeds, at the chosen learning rate: ``first_seed``, ``first_seed + 1`` and so on;
    two cannot tell recipes apart (see --plan).
    """
    first_seed: Count = 1
    """The first of the reported seeds."""
    sweep_seed: Count = 0
    """Seed with which learning rates are tried; it is not reported."""
    base: Config = no_flag(Config(optim=OptimConfig(warmup_steps=400), train=TrainConfig(precision="auto")))
    """Everything that is not a recipe's choice, a learning rate or a seed; `normlab.cli.presets` has
    more.
    """
    jobs: Count = 0
    """Runs to train at the same time; 0: one per usable core, or just one on a GPU; on Ray as many as its
    CPUs or GPUs have room for.
    """
    on: str = "local"
    """Where to train runs: local (this machine), or ray: the Ray cluster at RAY_ADDRESS, else the one that
    runs on this machine, else a new one on this machine alone.
    """
    out: Path = Path("runs")
    """Folder of the run folders, the prepared data, ``comparison.json`` and the page."""
    margin: Amount = 0.0
    """Smallest difference of the task's first metric that matters; 0: ten units of its last digit."""
    exchanges: Annotated[int, Ge(100), Lt(2**63)] = 2000
    """Number of random exchanges of outputs in the comparison of the trained models themselves."""
    force: bool = False
    """Also train combinations that their source does not define, and mark their results."""
    kept: tuple[str, ...] = no_flag(())
    """Fields of ``base`` that no baseline changes, because they were typed."""
    command: str = no_flag("")
    """The command as it was typed, for the page; empty if called from Python."""

    def __post_init__(self) -> None:
        names = self.setup or tuple(name.strip() for name in self.recipes)
        object.__setattr__(self, "recipes", names)
        for field_name, values in (("setups" if self.setup else "recipes", names), ("lrs", self.lrs)):
            if not values and not self.setup:
                raise UserError(f"a comparison needs at least one of {field_name}, but got none")
            if len(set(values)) < len(values):
                twice = next(item for item in values if values.count(item) > 1)
                raise UserError(f"{field_name} hold {twice} twice; name each once")
        has_sweep = len(self.lrs) != 1
        if has_sweep and self.sweep_seed in range(self.first_seed, self.first_seed + self.seeds):
            raise UserError(
                f"sweep_seed is {self.sweep_seed}, and the reported seeds are {self.first_seed} to "
                f"{self.first_seed + self.seeds - 1}; a seed that chooses a learning rate must not be "
                "reported: type another --sweep-seed or --first-seed"
            )


AROUND: Final = (0.5, 1.0, 2.0)
"""The multiples of a setup's own rate that are tried if no rates are named."""
NO_OUTCOME = ("new", "running", "done", "interrupted", "failed")
"""States of a run that has not come to its own end, and so says nothing about its recipe."""


def has_trained(outcome: str) -> bool:
    """Whether a run with this outcome trained."""
    return outcome.startswith("trained")


TEST_IS_DEV = (
    "The dev text serves as the test text, too. The scores called test were measured on the text on which "
    "learning rates and checkpoints were chosen, and flatter every {noun}."
)


def noun_of(task: str) -> str:
    """What is compared on a task: recipes, or setups of the user's own."""
    return "setup" if task == OWN_TASK else "recipe"


@dataclass(frozen=True)
class SweepRun:
    """One learning rate of one recipe, run with the seed of the sweep."""

    lr: float
    run: str
    dev: dict[str, float]
    """The best dev scores by metric name; empty if it was never validated."""
    outcome: str

    @classmethod
    def of(cls, run: str, lr: float, status: Status) -> SweepRun:
        return cls(lr, run, status.best_dev, status.ended_as)


def choose(trials: Sequence[SweepRun], metric: Metric = NLL) -> float:
    """Return the learning rate with the best dev ``metric``, a loss, among the runs that trained, or among
    all if none did. Ties go to the smaller rate.
    """

    def sort_key(trial: SweepRun) -> tuple[bool, float, float]:
        return has_trained(trial.outcome), metric.sort_key(trial.dev.get(metric.name)), -trial.lr

    return max(trials, key=sort_key).lr


@dataclass(frozen=True)
class RecipeResult:
    """One recipe: its sweep over learning rates, and its seeds at the chosen one."""

    name: str
    resolves_to: str
    """One line: placement, norm, embedding, scheme, schedule."""
    trials: tuple[SweepRun, ...]
    """The sweep, with a seed that is not reported; empty if there was only one rate, and so no choice."""
    lr: float
    """The learning rate that the sweep chose."""
    runs: tuple[str, ...]
    """Run ids at the chosen learning rate, in the order of ``Comparison.seeds``."""
    outcomes: tuple[str, ...] = ()
    trains: Interval | None = None
    """The share of runs that trained; None if none has ended."""
    scores: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Test scores by metric name, one for each seed; None for a run that has none."""
    means: dict[str, Interval] = field(default_factory=dict)
    """By metric name, the mean over the seeds that trained, on the metric's scale; from two seeds on it has
    an interval.
    """
    train_seconds: float = 0.0
    """Median over the runs at the chosen learning rate."""
    total_seconds: float = 0.0
    """Over every run of the recipe, the sweep included."""
    forced: str = ""
    """If this combination was forced: why its source does not define it."""
    explained: dict[str, str] = field(default_factory=dict)
    """Everything that it resolves to, a text for each label; empty if not recorded."""
    cost: Cost | None = None
    """None: not recorded."""

    def value(self, metric: Metric) -> float | None:
        """The mean test score; None if no seed trained, or if one that did has no score."""
        mean = self.means.get(metric.name)
        return mean.value if mean else None

    def by_seed(self, metric: Metric) -> str:
        """The score of each seed, in brackets if the run did not train."""
        scores = self.scores.get(metric.name, (None,) * len(self.runs))
        return metric.listed(scores, map(has_trained, self.outcomes))

    @property
    def trained(self) -> int:
        """The number of seeds that trained."""
        return sum(map(has_trained, self.outcomes))

    @property
    def ended(self) -> int:
        """The number of seeds whose run has an outcome; a run that ended in an error has none."""
        return sum(outcome not in NO_OUTCOME for outcome in self.outcomes)

    @property
    def states(self) -> str:
        """The outcomes with the number of seeds of each: ``trained (2), stuck (1)``."""
        return ", ".join(f"{state} ({number})" for state, number in Counter(self.outcomes).items())


@dataclass(frozen=True)
class RecipeDifference(Difference):
    """Two recipes compared: besides what any ``Difference`` holds, their costs and their trained models."""

    costs: str = ""
    """How ``a`` differs from ``b`` in parameters and FLOPs, in words; empty if those are not recorded."""
    models: float | None = None
    """The plain difference between the mean scores of the trained models."""
    p_models: float | None = None
    """The p value of that difference by exchanging outputs: it is about these models alone, not about their
    recipes, and not corrected for the number of pairs.
    """


@dataclass(frozen=True)
class Sample:
    """A test example with the output of each recipe at one seed, and at its chosen learning rate."""

    source: str
    reference: str
    """Empty if no output counts as the right one."""
    outputs: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Everything the page shows that is not in the run folders themselves."""

    title: str
    command: str
    """What to type to repeat it."""
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
    """The reported seeds, which played no part in any choice."""
    lrs: tuple[float, ...]
    recipes: tuple[RecipeResult, ...]
    samples: tuple[Sample, ...]
    margin: float
    """The smallest difference in the headline score that matters; a smaller one counts as none."""
    differences: tuple[RecipeDifference, ...] = ()
    sentences: tuple[str, ...] = ()
    """What was found, the headline first, in the sentences that pages and terminals show."""
    noise: float | None = None
    """The root mean square difference in the headline between two seeds of one recipe; None if no recipe has
    two seeds that trained.
    """
    sweep_seed: int | None = None
    """The seed of the sweep over learning rates; None if there was no choice."""
    rate_by: str = NLL.name
    """Name of the dev metric by which learning rates were chosen."""
    sample_seed: int | None = None
    """The seed whose outputs the samples are: the first of those at which most recipes have some."""
    open_recipes: tuple[str, ...] = ()
    """Recipes whose runs have not all ended."""
    failed: tuple[str, ...] = ()
    """Run ids that ended in an error, with the reason after a colon."""
    test_is_dev: bool = False
    """Whether all of the test text is dev text, on which the choices were made."""
    unigram_entropy_nats: float | None = None
    """Entropy of the training tokens that are predicted; None if not recorded."""
    signatures: dict[str, str] = field(default_factory=dict)
    """By metric name, the exact version of a score, if its library gives one."""
    sample_labels: tuple[str, str] = ("source", "reference")
    """The names of a sample's two given texts."""

    overlap: dict[str, float] = field(default_factory=dict)
    """The shares of dev and test that also occur in another text, by ``test in training`` and so on."""

    def page(self, path: str | Path, runs: str | Path | None = None) -> Path:
        """Draw the comparison as a page, one file that needs no network; return the path.

        ``runs`` is the folder of its run folders, by default that of the page.
        """
        from normlab.report.compare import write_compare_page

        return write_compare_page(self, Path(path).parent if runs is None else Path(runs), Path(path))

    @property
    def failed_runs(self) -> dict[str, str]:
        """By run id, the reason of each run that ended in an error; empty where none is known."""
        reasons = {}
        for entry in self.failed:
            run, _, reason = entry.partition(":")
            reasons[run.strip()] = reason.strip()
        return reasons

    @property
    def seen_before(self) -> str:
        """The warning that test text was read in training or for choices; empty if none of it was."""
        warnings = []
        others = ["training", "dev"]
        if self.test_is_dev:
            warnings.append(TEST_IS_DEV.format(noun=self.noun))
            others.remove("dev")
        for other in others:
            share = self.overlap.get(f"test in {other}")
            if share:
                warnings.append(f"{100 * share:.1f}% of the test sentences are also in the {other} text.")
        return " ".join(warnings)

    @property
    def noise_floor(self) -> str:
        """In words, by how much two seeds of one recipe differ; empty if that is not known."""
        if self.noise is None:
            return ""
        apart = self.headline.amount(self.noise)
        return f"Two seeds of the same {self.noun} differ by {apart} (root mean square)"

    @property
    def noun(self) -> str:
        """What is compared, as ``noun_of`` calls it."""
        return noun_of(self.task)

    @property
    def headline(self) -> Metric:
        """The metric by which recipes are ranked and compared."""
        return self.metrics[0]

    @property
    def dev_metric(self) -> Metric:
        """The dev metric by which checkpoints were chosen."""
        return selection_metric(self.metrics, self.best_by)

    @property
    def rate_metric(self) -> Metric:
        """The dev metric by which learning rates were chosen."""
        return selection_metric((NLL, *self.metrics), self.rate_by)

    @property
    def ranked(self) -> tuple[RecipeResult, ...]:
        """The recipes: first those that trained at every seed, then by mean test score."""

        def sort_key(recipe: RecipeResult) -> tuple[bool, float, int]:
            all_trained = 0 < recipe.trained == recipe.ended
            return all_trained, self.headline.sort_key(recipe.value(self.headline)), recipe.trained

        return tuple(sorted(self.recipes, key=sort_key, reverse=True))

    @property
    def tested(self) -> tuple[Metric, ...]:
        """The metrics that at least one recipe has on the test text."""
        return tuple(m for m in self.metrics if any(m.name in r.scores for r in self.recipes))

    @property
    def validated(self) -> tuple[Metric, ...]:
        """The dev metrics that pages draw: the one by which choices are made, and NLL."""
        return tuple({metric.name: metric for metric in (self.dev_metric, NLL)}.values())

    @property
    def progress(self) -> str:
        """``3 of 4 recipes finished``; empty once all are."""
        if not self.open_recipes:
            return ""
        finished = len(self.recipes)
        total = finished + len(self.open_recipes)
        return f"{finished} of {count(total, self.noun)} finished"
