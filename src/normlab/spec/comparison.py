"""The result of ``normlab compare`` as data: written once, drawn by the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from normlab.spec.units import count, p_value

MOSTLY = 0.5
"""A share of the translations; that one of them has more is a failure."""


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
    dev_bleu: float | None
    dev_nll: float | None
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
    bleu: Interval | None
    """Test BLEU: mean over the seeds whose translations exist, interval over sentences (bootstrap) and those
    seeds (Student's t); None: no seed has translations."""
    chrf: float | None
    bleu_tokenised: float | None
    dev_bleu: float | None
    train_seconds: float
    """Median over the runs at the chosen learning rate."""
    total_seconds: float
    """Over every run of the recipe, the sweep included."""
    forced: str = ""
    """Why a source does not define this combination, where it was forced."""
    explained: dict[str, str] = field(default_factory=dict)
    """Label to text of everything that it resolves to; empty: not recorded."""
    repeated: tuple[float, ...] = ()
    """Of each seed's translations, the share that the commonest one has, in 0 to 1; 0 where a line of the
    reference has as large a share. Empty: not recorded."""

    @property
    def unheard(self) -> str:
        """In words, that it answers most of the test text with one sentence; empty where no seed does."""
        shares = [share for share in self.repeated if share > MOSTLY]
        if not shares:
            return ""
        seeds = f"{len(shares)} of {count(len(self.repeated), 'seed')}"
        return (
            f"{seeds} gave at least {math.floor(100 * min(shares))}% of the test sentences one and the same "
            f"translation, so it does not read its source, whatever its BLEU"
        )


@dataclass(frozen=True)
class Difference:
    """Test BLEU of ``a`` minus that of ``b``, paired over sentences; the interval counts the seeds, too."""

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
    """Two-sided, before correction, by exchanging translations: of these models alone, not of their recipes;
    None: not recorded, or not as many seeds of one as of the other."""


def in_words(difference: Difference) -> str:
    """Its size and what both tests say of it, before correction."""
    delta = difference.delta
    said = (
        f"{delta.value:+z.2f} BLEU, 95% interval {delta.low:+z.2f} to {delta.high:+z.2f}; "
        f"bootstrap {p_value(difference.p)}"
    )
    exchanged = difference.p_randomisation
    return said if exchanged is None else f"{said}, randomisation {p_value(exchanged)}"


@dataclass(frozen=True)
class Sample:
    """A test sentence with each recipe's translation (first seed, chosen learning rate)."""

    source: str
    reference: str
    outputs: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Everything the page shows that is not in the run folders themselves."""

    title: str
    command: str
    """What to type to do it again."""
    date: str
    machine: str
    data: dict[str, str]
    """Facts in words: pairs, vocabulary, corpus, unigram entropy."""
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    signature: str
    """sacreBLEU's, of BLEU."""
    recipes: tuple[RecipeResult, ...]
    differences: tuple[Difference, ...]
    samples: tuple[Sample, ...]
    failed: tuple[str, ...] = ()
    """Run ids that ended in an error, with the reason after a colon."""
    test_is_dev: bool = False
    """No test text was given: the scores called test are of the dev text, on which choices were made."""
    unigram_entropy_nats: float | None = None
    """Of the target side's training tokens; None: not recorded."""
    signature_chrf: str = ""
    """sacreBLEU's, of chrF; empty: not recorded."""
    signature_tokenised: str = ""
    """sacreBLEU's, of the tokenised BLEU; empty: not recorded."""
