import itertools
import math
import random
import time

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from normlab.comparison import significance
from normlab.comparison.significance import holm
from normlab.tasks import scores
from normlab.tasks.scores import bleu_of_sums
from normlab.tasks.translation import Translation

BLEU_METRIC = Translation.metrics[0]


def sentence_statistics(outputs, references):
    """`[seeds, sentences, 10]`."""
    return np.stack([scores.sentence_statistics(lines, references) for lines in outputs])


def bleu_interval(rows, **options):
    return significance.interval(rows, bleu_of_sums, BLEU_METRIC, **options)


def paired_bootstrap(a, b, **options):
    return significance.paired_bootstrap(a, b, bleu_of_sums, **options)


def paired_randomisation(a, b, **options):
    return significance.paired_randomisation(a, b, bleu_of_sums, **options)


def differences(systems, references, **options):
    rows = {name: sentence_statistics(outputs, references) for name, outputs in systems.items()}
    return significance.differences(rows, bleu_of_sums, **options)


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


@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_summed_statistics_give_the_bleu_of_sacrebleu(count, share_right):
    for seed in range(3):
        references = text(count, seed=seed)
        hypotheses = translate(references, share_right, seed)
        hypotheses[0] = " ".join(hypotheses[0].split()[: 2 * seed])
        found = bleu_of_sums(sentence_statistics([hypotheses], references).sum(axis=1))
        assert found.shape == (1,)
        expected = BLEU(force=True).corpus_score(hypotheses, [references]).score
        assert found[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
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
    with pytest.raises(ValueError, match="2 translations but 3 references"):
        sentence_statistics([["a", "b"]], ["a", "b", "c"])


# ------------------------------------------------------------------------------------------------ bootstrap


def slow_bootstrap(outputs, references, resamples, seed):
    """Standard deviation of mean BLEU when sentences are drawn again, by asking sacreBLEU each time."""
    draw, metric = random.Random(seed), BLEU(force=True)
    found = []
    for _ in range(resamples):
        rows = draw.choices(range(len(references)), k=len(references))
        drawn = [references[i] for i in rows]
        scores = [metric.corpus_score([o[i] for i in rows], [drawn]).score for o in outputs]
        found.append(sum(scores) / len(scores))
    return float(np.std(found))


def test_the_interval_is_that_of_a_slow_bootstrap():
    references = text(80)
    outputs = [translate(references, 0.7, seed=4)]
    found = bleu_interval(sentence_statistics(outputs, references), resamples=4000)
    assert found.value == pytest.approx(BLEU(force=True).corpus_score(outputs[0], [references]).score)
    slow = slow_bootstrap(outputs, references, 300, seed=1)
    assert found.high - found.low == pytest.approx(2 * 1.96 * slow, rel=0.15)
    assert found.low + found.high == pytest.approx(2 * found.value)


def test_an_interval_stays_between_0_and_100_and_knows_a_copy():
    references = text(50)
    best = bleu_interval(sentence_statistics([references], references), resamples=100)
    assert (best.value, best.low, best.high) == pytest.approx((100, 100, 100))
    worst = bleu_interval(sentence_statistics([[""] * 50] * 2, references), resamples=100)
    assert (worst.value, worst.low, worst.high) == (0, 0, 0)
    bad = bleu_interval(sentence_statistics([translate(references, 0.25, 1)] * 2, references), resamples=100)
    assert 0 <= bad.low < bad.value < bad.high


def test_the_interval_covers_the_truth():
    random = np.random.default_rng(5)
    truth = bleu_interval(made_up(random, [0.7] * 40, 400), resamples=10).value
    covered = 0
    for _ in range(120):
        qualities = 0.7 + 0.01 * random.standard_normal(3)
        found = bleu_interval(made_up(random, qualities, 100), resamples=100)
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / 120 <= 1


def p_without_difference(random, seeds, spread, count):
    """p of pairs of one recipe with itself, whose seeds' qualities differ by ``spread``."""
    found = []
    for _ in range(count):
        a, b = (made_up(random, 0.7 + spread * random.standard_normal(seeds), 60) for _ in range(2))
        found.append(paired_bootstrap(a, b, resamples=100)[1])
    return np.array(found)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05], ids=["alike", "as sentences", "far apart"])
@pytest.mark.parametrize("seeds", [2, 3])
def test_where_there_is_no_difference_few_are_found(seeds, spread):
    p = p_without_difference(np.random.default_rng(seeds), seeds, spread, 200)
    assert (p < 0.05).mean() <= 0.085
    assert (p < 0.01).mean() <= 0.03


def test_p_of_no_difference_is_about_uniform():
    p = np.sort(p_without_difference(np.random.default_rng(1), 1, 0.0, 400))
    assert np.abs(p - (np.arange(400) + 0.5) / 400).max() < 1.63 / math.sqrt(400), "Kolmogorov-Smirnov, 1%"


def test_planted_differences_are_found_with_their_sign_and_size():
    random = np.random.default_rng(2)
    better = [made_up(random, [0.74, 0.745, 0.735], 300) for _ in range(20)]
    worse = [made_up(random, [0.70, 0.705, 0.695], 300) for _ in range(20)]
    found = [paired_bootstrap(a, b, resamples=200) for a, b in zip(better, worse, strict=True)]
    assert sum(p < 0.05 for _, p in found) >= 19
    assert all(delta.value > 0 and delta.low < delta.value < delta.high for delta, _ in found)
    turned, p = paired_bootstrap(worse[0], better[0], resamples=200)
    assert p == pytest.approx(found[0][1])
    assert (turned.low, turned.high) == pytest.approx((-found[0][0].high, -found[0][0].low))


def test_pairing_finds_what_hides_behind_hard_and_easy_sentences():
    references = text(200)
    a = [line if i % 2 else "y z" for i, line in enumerate(references)]
    b = [" ".join(line.split()[:-1]) if i % 8 == 1 else line for i, line in enumerate(a)]
    statistics = [sentence_statistics([lines], references) for lines in (a, b)]
    width = [i.high - i.low for i in (bleu_interval(s, resamples=500) for s in statistics)]
    delta, p = paired_bootstrap(*statistics, resamples=500)
    assert delta.high - delta.low < min(width) / 2
    assert delta.value < min(width) / 2
    assert p < 0.05


def test_equal_outputs_do_not_differ_and_blatant_ones_do():
    references = text(30)
    copy, silence = (sentence_statistics([lines], references) for lines in (references, [""] * 30))
    delta, p = paired_bootstrap(copy, copy, resamples=100)
    assert (delta.value, delta.low, delta.high, p) == (0, 0, 0, 1.0)
    delta, p = paired_bootstrap(copy, silence, resamples=100)
    assert delta.value == pytest.approx(100)
    assert p < 1e-9


def test_one_sentence_proves_nothing():
    one = [sentence_statistics([[line]], ["a b c d e"]) for line in ("a b c d e", "x")]
    assert paired_bootstrap(*one, resamples=100)[1] == 1.0


def test_statistics_of_other_texts_are_refused():
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match="a has 20 examples and b 21"):
        paired_bootstrap(made_up(random, [0.5], 20), made_up(random, [0.5], 21), resamples=100)


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


def test_randomisation_and_bootstrap_agree_about_two_models():
    random = np.random.default_rng(8)
    pairs = [(made_up(random, [0.7], 200), made_up(random, [0.7 + 0.002 * i], 200)) for i in range(12)]
    found = [(paired_randomisation(a, b), paired_bootstrap(a, b)[1]) for a, b in pairs]
    assert all(abs(x - y) < 0.06 for x, y in found)
    assert min(x for x, _ in found) < 0.01 < 0.3 < max(x for x, _ in found)


def test_only_as_many_of_one_as_of_the_other_are_exchanged():
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"^a has 1 seeds of 20 examples and b 2 of 20, but all outputs"):
        paired_randomisation(made_up(random, [0.5], 20), made_up(random, [0.5, 0.5], 20))


# ---------------------------------------------------------------------------------------- many comparisons


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.9, 0.8]) == (1.0, 1.0)
    assert holm([]) == ()


def test_holm_is_between_no_correction_and_bonferroni_and_keeps_the_order():
    draw = random.Random(3)
    for count in range(1, 8):
        p = [draw.random() ** 3 for _ in range(count)]
        fair = holm(p)
        assert all(a <= b <= min(1, count * a) + 1e-12 for a, b in zip(p, fair, strict=True))
        assert [b for _, b in sorted(zip(p, fair, strict=True))] == sorted(fair)


def test_every_pair_is_compared_once_and_corrected():
    references = text(150)
    shares = {"bad": 0.5, "good": 0.8, "same": 0.8}
    systems = {
        name: [translate(references, share, f"{name}{seed}") for seed in range(3)]
        for name, share in shares.items()
    }
    found = differences(systems, references, resamples=300)
    assert [(d.a, d.b) for d in found] == list(itertools.combinations(shares, 2))
    assert [d.significant for d in found] == [True, True, False]
    assert [d.delta.value < 0 for d in found[:2]] == [True, True]
    assert holm([d.p for d in found]) == tuple(d.p_corrected for d in found)
    a, b = (sentence_statistics(systems[name], references) for name in ("bad", "good"))
    assert paired_bootstrap(a, b, resamples=300) == (found[0].delta, found[0].p), "alone as among others"
    assert paired_randomisation(a, b, trials=300) == found[0].p_randomisation
    systems["good"].pop()
    fewer = differences(systems, references, resamples=300)
    assert [d.p_randomisation is None for d in fewer] == [True, False, True]
    systems["good"].append(translate(references, 0.8, "good2"))
    assert differences(systems, references, resamples=300) == found, "the same draws every time"


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_systems_have_no_difference(count):
    assert differences({"a": [["x y z w"]]} if count else {}, ["x y z w"], resamples=10) == ()


def test_five_recipes_of_three_seeds_and_a_thousand_sentences_take_seconds():
    random = np.random.default_rng(0)
    systems = [made_up(random, [0.6] * 3, 1000) for _ in range(5)]
    start = time.perf_counter()
    for a, b in itertools.combinations(systems, 2):
        paired_bootstrap(a, b)
    assert time.perf_counter() - start < 3 * 5, "five times the 3 s it may take on an idle core"
