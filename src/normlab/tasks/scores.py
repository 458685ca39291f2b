"""Translation scores by sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


@dataclass(frozen=True)
class Scores:
    """Corpus scores of one translation, all from 0 to 100, each with sacreBLEU's signature."""

    bleu: float
    """Papineni et al. 2002, on sacreBLEU's own tokens (13a), n-grams without a match smoothed (exp)."""
    chrf: float
    """chrF2 of characters up to 6-grams, Popović 2015 (W15-3049)."""
    bleu_tokenised: float
    """BLEU as the papers measured it (``multi-bleu.perl``): on tokenised text, cased, not smoothed."""
    signature: str
    """Of ``bleu``."""
    signature_chrf: str
    signature_tokenised: str


def score(hypotheses: Sequence[str], references: Sequence[str], *, tokenised: bool = False) -> Scores:
    """Corpus scores of one translation against one reference.

    ``tokenised``: the text is already split into tokens by blanks (by Moses, say); ``bleu_tokenised`` takes
    it as it is (``tok:none``). Raw text is split for it at punctuation and symbols (``tok:intl``), which is
    not Moses to the letter: abbreviations and apostrophes differ.

    Raises ValueError if there is nothing to score or the two differ in length.
    """
    check_lengths(hypotheses, references)
    metrics = (
        BLEU(force=tokenised),
        CHRF(),
        BLEU(tokenize="none" if tokenised else "intl", smooth_method="none", force=True),
    )
    bleu, chrf, own = (float(m.corpus_score(list(hypotheses), [list(references)]).score) for m in metrics)
    return Scores(bleu, chrf, own, *(str(m.get_signature()) for m in metrics))


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """``Scores.bleu`` alone, as validations need it."""
    check_lengths(hypotheses, references)
    return float(BLEU(force=True).corpus_score(list(hypotheses), [list(references)]).score)


def check_lengths(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise ValueError unless there is one reference for each hypothesis, and at least one."""
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses):,} translations but {len(references):,} references; give one line for each"
        )
    if not references:
        raise ValueError("there is nothing to score: translations and references are empty")
