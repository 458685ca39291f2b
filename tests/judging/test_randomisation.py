import itertools
import math
import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from cases import each
from normlab.judging import statistics
from normlab.lab.tasks import scores
from normlab.lab.tasks.scores import bleu_of_sums


def sentence_statistics(outputs, references):
    """`[seeds, sentences, 10]`."""
    return np.stack([scores.sentence_statistics(lines, references) for lines in outputs])


def paired_randomisation(a, b, *, trials=2000):
    return statistics.paired_randomisation(a, b, bleu_of_sums, trials=trials)


WORDS = [*"abcdefghijklmnopqrst", ".", ",", "don't", "(x)"]


def text(count, *, seed=0, longest=20):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


def translate(references, share_right, seed):
    """The references with words exchanged at random, as a system of that quality might give them."""
    draw = random.Random(seed)
    return [
        " ".join(w if draw.random() < share_right else draw.choice(WORDS) for w in line.split())
        for line in references
    ]


def made_up(random, qualities, sentences):
    """`[seeds, sentences, 10]` statistics of systems that get each n-gram right with probability quality**n.

    Made without text, for tests that need thousands of systems.
    """
    length = 8 + np.arange(sentences) % 16
    orders = np.arange(1, 5)
    total = np.maximum(length[:, None] - orders + 1, 0)
    correct = random.binomial(total, np.asarray(qualities)[:, None, None] ** orders)
    seeds = len(correct)
    lengths = np.broadcast_to(np.stack([length, length], axis=-1), (seeds, sentences, 2))
    totals = np.broadcast_to(total, (seeds, sentences, 4))
    return np.concatenate([lengths, correct, totals], axis=-1).astype(np.float64)


# ------------------------------------------------------------------------------------- sufficient statistics


@each("share_right", [0.0, 0.3, 0.8, 1.0])
@each("count", [1, 5, 60])
def test_summed_statistics_give_the_bleu_of_sacrebleu(count, share_right):
    for seed in range(3):
        references = text(count, seed=seed)
        hypotheses = translate(references, share_right, seed)
        hypotheses[0] = " ".join(hypotheses[0].split()[: 2 * seed])
        found = bleu_of_sums(sentence_statistics([hypotheses], references).sum(axis=1))
        assert found.shape == (1,)
        expected = BLEU(force=True).corpus_score(hypotheses, [references]).score
        assert found[0] == pytest.approx(expected, abs=1e-9)


@each(
    ("hypothesis", "reference"),
    [
        ("", "a b c d e"),
        ("x y z", "a b c d e"),
        ("x y z v w", "a b c d e"),
        ("a b c", "a b c"),
        ("a x b y c z", "a b c d e f"),
        ("a b x c d y", "a b c d e f"),
        ("a b c x d e f", "a b c d e f"),
        ("a b c d", "a b c d e f g h"),
        ("a b c d e f g h", "a b c d"),
        ("a b", ""),
    ],
)
def test_corner_cases_of_smoothing_and_brevity(hypothesis, reference):
    found = bleu_of_sums(sentence_statistics([[hypothesis]], [reference]).sum(axis=1))[0]
    assert found == pytest.approx(BLEU().corpus_score([hypothesis], [[reference]]).score, abs=1e-9)


def test_statistics_of_texts_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\b2 .*\b3\b"):
        sentence_statistics([["a", "b"]], ["a", "b", "c"])


# ------------------------------------------------------------------------------ approximate randomisation


def exact_p(a, b):
    """p over all 2**n exchanges of n sentences, by sacreBLEU on the exchanged texts; a and b are lists over
    seeds of translations.
    """
    references = text(len(a[0]), seed=5)

    def bleu(outputs):
        scores = [BLEU(force=True).corpus_score(lines, [references]).score for lines in outputs]
        return sum(scores) / len(scores)

    seen, as_large = abs(bleu(a) - bleu(b)), 0
    patterns = list(itertools.product([False, True], repeat=len(references)))
    for pattern in patterns:
        left = [
            [y if moved else x for x, y, moved in zip(*both, pattern, strict=True)]
            for both in zip(a, b, strict=True)
        ]
        right = [
            [x if moved else y for x, y, moved in zip(*both, pattern, strict=True)]
            for both in zip(a, b, strict=True)
        ]
        as_large += abs(bleu(left) - bleu(right)) >= seen - 1e-9
    return as_large / len(patterns)


@pytest.mark.parametrize(("seeds", "shares"), [(1, (0.9, 0.6)), (2, (0.9, 0.7)), (1, (0.8, 0.8))])
def test_randomisation_is_the_share_of_all_exchanges(seeds, shares):
    references = text(7, seed=5)
    a, b = (
        [translate(references, share, f"{share}{side}{seed}") for seed in range(seeds)]
        for side, share in enumerate(shares)
    )
    statistics = [sentence_statistics(outputs, references) for outputs in (a, b)]
    found, exact = paired_randomisation(*statistics, trials=20_000), exact_p(a, b)
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000) + 1e-4)
    assert paired_randomisation(*statistics[::-1], trials=20_000) == found


def test_one_different_sentence_proves_nothing_to_randomisation():
    references = text(50)
    other = [*references[:-1], "y z"]
    statistics = [sentence_statistics([lines], references) for lines in (references, other)]
    assert paired_randomisation(*statistics, trials=500) == 1.0
    assert paired_randomisation(statistics[0], statistics[0], trials=100) == 1.0


def test_the_least_p_of_randomisation_counts_what_was_seen():
    references = text(40)
    copy, silence = (sentence_statistics([lines], references) for lines in (references, [""] * 40))
    assert paired_randomisation(copy, silence, trials=999) == pytest.approx(1 / 1000)


def test_p_of_randomisation_is_about_uniform_where_nothing_differs():
    random = np.random.default_rng(4)
    p = np.sort(
        [
            paired_randomisation(made_up(random, [0.7], 60), made_up(random, [0.7], 60), trials=199)
            for _ in range(400)
        ]
    )
    assert np.abs(p - (np.arange(400) + 0.5) / 400).max() < 1.63 / math.sqrt(400), "Kolmogorov-Smirnov, 1%"


def test_only_as_many_of_one_as_of_the_other_are_exchanged():
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"^a .*\b1 .*\bb 2 "):
        paired_randomisation(made_up(random, [0.5], 20), made_up(random, [0.5, 0.5], 20))
