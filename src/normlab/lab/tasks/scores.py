"""Score translations with sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from normlab.base.io import validated
from normlab.base.units import count, p_value
from normlab.errors import UserError
from normlab.lab.data.pretokenizer import primary

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TranslationScores:
    """Corpus scores of one translation, all from 0 to 100, each with sacreBLEU's signature."""

    bleu: float
    """BLEU (Papineni et al. 2002) on sacreBLEU's tokens for the language, see ``bleu_tokens``, with
    exponential smoothing of n-grams without a match.
    """
    chrf: float
    """chrF2 of characters up to 6-grams, Popović 2015 (W15-3049)."""
    bleu_tokenised: float
    """BLEU as papers measured it (``multi-bleu.perl``): on tokenised text, cased, not smoothed."""
    signature: str
    """sacreBLEU's signature of ``bleu``."""
    signature_chrf: str
    signature_tokenised: str

    def values(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _METRICS}

    def signatures(self) -> dict[str, str]:
        signatures = (self.signature, self.signature_chrf, self.signature_tokenised)
        return dict(zip(_METRICS, signatures, strict=True))


_METRICS = ("bleu", "chrf", "bleu_tokenised")
_TOKENISERS = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}
"""sacreBLEU's tokenisers of languages that are written without spaces between words."""


def bleu_tokens(target_lang: str) -> str:
    """Return the name of sacreBLEU's tokeniser for a language: ``zh``, ``ja-mecab`` and ``ko-mecab`` for
    Chinese, Japanese and Korean, ``13a`` for all others.
    """
    return _TOKENISERS.get(primary(target_lang), "13a")


def require_bleu_tokens(target_lang: str) -> None:
    """Raise UserError if BLEU of that language needs a package that is not installed."""
    tokens = bleu_tokens(target_lang)
    try:
        BLEU(tokenize=tokens)
    except RuntimeError as error:
        raise UserError(
            f"BLEU of the target language {target_lang!r} needs MeCab to find words; type: pip install "
            f"'normlab[{tokens.partition('-')[0]}]'"
        ) from error


@validated
def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenised: bool = False, target_lang: str = ""
) -> TranslationScores:
    """Compute the corpus scores of one translation against one reference.

    ``target_lang`` determines the tokens of ``bleu``, and of ``bleu_tokenised`` for a language written
    without spaces; chrF needs none.

    ``tokenised``: spaces already split the text into tokens (from Moses, say), and ``bleu_tokenised`` uses
    these (``tok:none``). Raw text is split for it at punctuation and symbols (``tok:intl``); this is close to
    the Moses tokeniser of ``multi-bleu.perl``, but differs in abbreviations and apostrophes.

    Raises UserError if there is nothing to score, if the two differ in length, or if a package for the
    language is missing.

    >>> round(normlab.score(["the cat sat on the mat"], ["the cat sat on the mat"]).bleu, 1)
    100.0
    """
    _check_lengths(hypotheses, references)
    require_bleu_tokens(target_lang)
    tokens = bleu_tokens(target_lang)
    raw = tokens if primary(target_lang) in _TOKENISERS else "intl"
    bleu = BLEU(force=tokenised, tokenize=tokens)
    chrf = CHRF()
    bleu_tokenised = BLEU(tokenize="none" if tokenised else raw, smooth_method="none", force=True)
    scores = []
    for metric in (bleu, chrf, bleu_tokenised):
        scores.append(float(metric.corpus_score(list(hypotheses), [list(references)]).score))
    return TranslationScores(
        *scores,
        signature=str(bleu.get_signature()),  # which is complete once something was scored
        signature_chrf=str(chrf.get_signature()),
        signature_tokenised=str(bleu_tokenised.get_signature()),
    )


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], *, target_lang: str = "") -> float:
    """Compute only ``TranslationScores.bleu``, which validations need."""
    _check_lengths(hypotheses, references)
    metric = BLEU(force=True, tokenize=bleu_tokens(target_lang))
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def sentence_statistics(
    hypotheses: Sequence[str], references: Sequence[str], *, target_lang: str = ""
) -> Array:
    """Return the statistics of each sentence that determine corpus BLEU, `[sentences, 10]`.

    In order: tokens of the translation, of the reference, matching 1- to 4-grams, and 1- to 4-grams of the
    translation; sacreBLEU's tokens for the language (13a for most). ``bleu_of_sums`` of their sums is BLEU.
    """
    _check_lengths(hypotheses, references)
    # effective_order affects only sentence scores, which are not used
    metric = BLEU(effective_order=True, tokenize=bleu_tokens(target_lang))
    scores = [metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores], dtype=np.float64)


def bleu_of_sums(sums: Array) -> Array:
    """Compute BLEU `[...]`, 0 to 100, from summed statistics `[..., 10]`, as sacreBLEU's ``smooth:exp`` does.

    The k-th order without a match counts as 2**-k matches; BLEU is 0 without any match or any 4-gram.
    """
    lengths, reference_lengths = sums[..., 0], sums[..., 1]
    correct, total = sums[..., 2:6], sums[..., 6:10]  # n-grams of 1 to 4 tokens
    unmatched = correct == 0
    matches = np.where(unmatched, 0.5 ** np.cumsum(unmatched, axis=-1), correct)
    usable = (total > 0).all(axis=-1) & ~unmatched.all(axis=-1)
    precision = np.where(usable[..., None], matches / np.maximum(total, 1), 1.0)
    brevity = np.minimum(0.0, 1 - reference_lengths / np.maximum(lengths, 1))
    return np.where(usable, 100 * np.exp(np.log(precision).mean(axis=-1) + brevity), 0.0)


def against(
    hypotheses: Sequence[str], baseline: Sequence[str], references: Sequence[str], *, target_lang: str = ""
) -> str:
    """Describe BLEU of translations minus that of a baseline, with p of sacreBLEU's two paired tests.

    The paired bootstrap (Koehn 2004, W04-3250) and approximate randomisation (Riezler and Maxwell 2005,
    W05-0908), as ``sacrebleu.significance`` computes them.
    """
    _check_lengths(hypotheses, references)
    _check_lengths(baseline, references)
    if list(hypotheses) == list(baseline):  # sacreBLEU's p would be the smallest possible
        return "nothing, the translations are the same"
    systems: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("these", list(hypotheses))]
    tests = []
    difference = 0.0
    for kind, words in (("bs", "paired bootstrap"), ("ar", "approximate randomisation")):
        metrics = {"BLEU": BLEU(tokenize=bleu_tokens(target_lang), references=[list(references)])}
        _, scores = PairedTest(systems, metrics, references=None, test_type=kind)()
        of_baseline, of_these = (result for result in scores["BLEU"] if isinstance(result, Result))
        difference = of_these.score - of_baseline.score
        tests.append(f"{words} {p_value(float(of_these.p_value or 0.0))}")
    return f"{difference:+z.2f} BLEU; {', '.join(tests)}"


def _check_lengths(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise UserError unless there are as many references as hypotheses, and at least one."""
    if len(hypotheses) != len(references):
        raise UserError(
            f"{count(len(hypotheses), 'translation')} but {count(len(references), 'reference')}; give one "
            "line for each"
        )
    if not references:
        raise UserError("there is nothing to score: translations and references are empty")
