"""Translation: batches of sentence pairs, a label-smoothed loss, BLEU with beam search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from normlab.base.metric import NLL, Metric
from normlab.base.model_config import derive
from normlab.base.units import count as number_of
from normlab.base.units import perplexity
from normlab.errors import UserError
from normlab.lab.config import PARALLEL_TEXTS, Config, DecodeConfig
from normlab.lab.data.batches import Batch, PairBatches, dev_batches
from normlab.lab.data.parallel import LONGEST_SENTENCE, Corpus, prepare, require_lengths
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import plan_shapes
from normlab.lab.data.text import require_words
from normlab.lab.data.tokenizer import UNK, Tokenizer
from normlab.lab.tasks.scores import (
    bleu_of_sums,
    corpus_bleu,
    require_bleu_tokens,
    score,
    sentence_statistics,
)
from normlab.lab.tasks.task import Array, Evaluation, LossSum, Task, choice_of, label_smoothed, repeated_share
from normlab.nn import PAD, Seq2Seq
from normlab.nn.decode import EOS, FREE, Bounds, Hypothesis, sample, search
from normlab.nn.model import evaluating

_SEARCHED_SENTENCES = 200
"""About one full batch of the search: with fewer, each sentence would seem to cost more than it does."""
SEARCH_POSITIONS = 4096
"""Source positions in a batch of the search, summed over its beams."""


class Translation(Task[Corpus, Seq2Seq, Batch], name="translation"):
    """Sentence pairs, a label-smoothed loss, BLEU with beam search."""

    texts = (*PARALLEL_TEXTS, "dataset")
    stacks = ("encoder", "decoder")
    has_source = True
    metrics = (
        Metric("bleu", "BLEU", least=0.0, most=100.0),
        Metric("chrf", "chrF", least=0.0, most=100.0, on_dev=False),
        Metric("bleu_tokenised", "tokenised BLEU", least=0.0, most=100.0, on_dev=False),
        NLL,
        Metric("perplexity", "perplexity", "of a token", higher_is_better=False, least=1.0, on_dev=False),
        Metric("perplexity_smoothed", "label-smoothed perplexity", higher_is_better=False, on_dev=False),
    )

    def __init__(self, config: Config, corpus: Corpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        shapes = plan_shapes(corpus.train, config.train.max_tokens)
        self.batches = PairBatches(corpus.train, shapes, config.seeds.data)
        masks, types = config.data.target_vocab_mask, torch.from_numpy(corpus.target_vocab)
        self.allowed = types.to(device) if masks else None
        """The vocabulary entries that may be produced `[V]`; None if none is masked."""

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        require_bleu_tokens(config.data.target_lang)

    check_lengths = staticmethod(require_lengths)
    prepare = staticmethod(prepare)

    def build(self) -> Seq2Seq:
        first = self.batches.at(0)
        return self.initialised(Seq2Seq, self.corpus.tokenizer.vocab_size, first.source, first.target_in)

    def batch(self, index: int) -> Batch:
        seed = derive(self.config.seeds.data, "word_dropout")
        batch = self.batches.at(index, word_dropout=self.config.data.word_dropout, seed=seed)
        return batch.to(self.device)

    def loss(self, model: Seq2Seq, batch: Batch) -> LossSum:
        logits = model(batch.source, batch.target_in)
        smoothing = self.config.optim.label_smoothing
        return label_smoothed(logits, batch.target_out, smoothing, self.allowed, PAD)

    def dev_nlls(self, model: Seq2Seq) -> tuple[float, float]:
        """Return dev's negative log-likelihood in nats per token, without label smoothing, and the cost of
        giving each of the first ``train.dev_decode_sentences`` sentences the source of the one before it; NaN
        if there is no other sentence.
        """
        dev, count = self.corpus.dev, self.config.train.dev_decode_sentences
        first = np.arange(len(dev)) < max(count, 2)
        some = dev.only(first)
        own = self._sums(model, some)
        nll, _, tokens = own + self._sums(model, dev.only(~first))
        if len(dev) < 2:
            return nll / tokens, math.nan
        exchanged = self._sums(model, TokenPairs(some.source.shifted(), some.target))
        return nll / tokens, (exchanged - own)[0] / own[2]

    @torch.inference_mode()
    def _sums(self, model: Seq2Seq, pairs: TokenPairs, smoothing: float = 0.0) -> Array:
        """Return the negative log-likelihood and the label-smoothed loss, in nats summed over the target
        tokens, and the number of these tokens.

        Tokens that the mask excludes are left out: they would make both infinite for every model.
        """
        nll, loss = (torch.zeros((), device=self.device) for _ in range(2))
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        with evaluating(model):
            for batch in dev_batches(pairs, 2 * self.config.train.max_tokens):
                batch = batch.to(self.device)
                logits = model(batch.source, batch.target_in)
                target = batch.target_out
                if self.allowed is not None:
                    target = target.masked_fill(~self.allowed[target], PAD)
                sums = label_smoothed(logits, target, smoothing, self.allowed, PAD)
                nll, loss = nll + sums.nll, loss + sums.loss
                tokens += (target != PAD).sum()
        return np.array([float(nll), float(loss), int(tokens)])

    def dev_outputs(self, model: Seq2Seq, count: int | None = None) -> list[str]:
        """Return greedy translations of dev sentences, by default ``train.dev_decode_sentences`` of them."""
        source = self.corpus.dev_text.source[: count or self.config.train.dev_decode_sentences]
        return self._translate(model, source, DecodeConfig(beam=1))

    def dev_bleu(self, outputs: Sequence[str]) -> float:
        """Return sacreBLEU for translations of the first dev sentences."""
        references = self.corpus.dev_text.target[: len(outputs)]
        return corpus_bleu(outputs, references, target_lang=self.config.data.target_lang)

    def dev_scores(self, model: Seq2Seq) -> dict[str, float]:
        (nll, exchange_cost), outputs = self.dev_nlls(model), self.dev_outputs(model)
        scores = {"nll": nll, "bleu": self.dev_bleu(outputs)}
        if len(self.corpus.dev) > 1:  # else there is no other source
            scores["nll_exchanged"] = nll + exchange_cost
        references = self.corpus.dev_text.target[: len(outputs)]
        return {**scores, "repeated_share": repeated_share(outputs, references)}

    def test(self, model: Seq2Seq) -> Evaluation:
        """Score the translations of the test text, and compute the perplexity of its references."""
        pairs, language = self.corpus.test_text, self.config.data.target_lang
        hypotheses = self._translate(model, pairs.source, self.config.decode)
        self.advance("scoring", 0.0)
        scores = score(hypotheses, pairs.target, target_lang=language)
        return Evaluation(
            scores={**scores.values(), **self._perplexities(model)},
            outputs=hypotheses,
            examples={"bleu": sentence_statistics(hypotheses, pairs.target, target_lang=language)},
            signatures=scores.signatures(),
        )

    @classmethod
    def combine(cls, metric: str, sums: Array) -> Array:
        assert metric == "bleu"
        return bleu_of_sums(sums)

    @classmethod
    def test_examples(cls, config: Config, corpus: Corpus) -> Sequence[tuple[str, str]]:
        return list(zip(corpus.test_text.source, corpus.test_text.target, strict=True))

    def _translate(self, model: Seq2Seq, lines: Sequence[str], decode: DecodeConfig) -> list[str]:
        on_done, allowed = partial(self.advance, "translating"), self.allowed
        tokenizer = self.corpus.tokenizer
        best = n_best_lines(model, tokenizer, lines, decode, count=1, allowed=allowed, on_done=on_done)
        return [candidates[0].text for candidates in best]

    def _perplexities(self, model: Seq2Seq) -> dict[str, float]:
        r"""Return ``nll`` in nats per test token, ``perplexity`` :math:`e^{nll}`, and
        ``perplexity_smoothed``, :math:`e` to the mean label-smoothed loss with the smoothing of training.

        All depend on the run's tokenizer. References longer than ``LONGEST_SENTENCE`` or than the model's
        positions are left out; if none is left, the values are NaN.
        """
        text, tokenizer = self.corpus.test_text, self.corpus.tokenizer
        longest = min(model.position_encoding.longest or LONGEST_SENTENCE, LONGEST_SENTENCE)
        both = zip(tokenizer.encode(text.source), tokenizer.encode_target(text.target), strict=True)
        fitting = [pair for pair in both if max(map(len, pair)) < longest]
        nll = loss = math.nan
        if fitting:
            pairs = TokenPairs(*(Ragged.of(side) for side in zip(*fitting, strict=True)))
            *sums, tokens = self._sums(model, pairs, self.config.optim.label_smoothing)
            nll, loss = (each / tokens for each in sums)
        return {"nll": nll, "perplexity": perplexity(nll), "perplexity_smoothed": perplexity(loss)}

    def rehearse(self, model: Seq2Seq) -> tuple[float, float]:
        """Time the dev losses in full, and greedy search on some dev sentences, scaled to all of them and
        from the maximal lengths of this model's outputs to those of the references. The test is assumed to
        take the same time per sentence and beam.
        """
        searched = min(self.config.train.dev_decode_sentences, len(self.corpus.dev_text))
        few = min(searched, _SEARCHED_SENTENCES)
        start = time.perf_counter()
        self.dev_nlls(model)
        likelihood = time.perf_counter() - start
        self.dev_outputs(model, few)
        source, target = (side.lengths.mean() for side in (self.corpus.dev.source, self.corpus.dev.target))
        ended = min(1.0, target / (self.config.decode.max_len_ratio * source + 10))
        sentence = (time.perf_counter() - start - likelihood) / few * ended
        beams = len(self.corpus.test_text) * _width(self.config.decode, 1)
        return likelihood + searched * sentence, beams * sentence


@dataclass(frozen=True)
class Candidate:
    """A translation with its score: its log-probability, which beam search divides by the length penalty."""

    text: str
    score: float


def n_best_lines(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    decode: DecodeConfig,
    *,
    count: int,
    prefixes: Sequence[str] | None = None,
    allowed: Tensor | None = None,
    on_done: Callable[[float], None] = lambda share: None,
) -> list[list[Candidate]]:
    """Return ``count`` translations of each raw line: the best of a search, best first, or samples.

    Each begins with its line's prefix. A line without words has one empty translation, and so does a line for
    which a diverged model finds none. Samples depend only on ``sample_seed``, the line's number and the
    sample's. ``on_done`` is called after each batch with the share of the lines translated so far.

    Raises UserError for a count that the search cannot give, for prefixes that cannot be produced, and for
    lines that are too long.
    """
    width = _width(decode, count)
    require_words(lines, "the text")
    encoded = tokenizer.encode(list(lines))
    forced = _prefix_ids(tokenizer, [""] * len(lines) if prefixes is None else prefixes, allowed)
    if len(forced) != len(lines):
        given = f"{len(forced):,} prefix{'es' * (len(forced) != 1)}"
        raise UserError(f"{number_of(len(lines), 'line')} but {given}; give one for each, '' for none")
    _require_short(encoded, "")
    _require_short(forced, " in its prefix")
    device = next(model.parameters()).device
    outputs = [[Candidate("", 0.0)] for _ in lines]
    finished = 0
    with evaluating(model):
        for rows, source in _search_batches(encoded, SEARCH_POSITIONS // width):
            prefix = _prefix([forced[row] for row in rows], device)
            bounds = Bounds(decode.max_len_ratio, decode.min_length, prefix, allowed)
            hypotheses = _search(model, source.to(device), decode, bounds, rows, width)
            for row, of_row in zip(rows, hypotheses, strict=True):
                best = of_row[:count]
                texts = tokenizer.decode([h.ids for h in best])
                candidates = [Candidate(text, h.score) for text, h in zip(texts, best, strict=True)]
                outputs[row] = candidates or [Candidate("", -math.inf)]
            finished += len(rows)
            on_done(finished / len(lines))
    return outputs


def _require_short(sentences: Sequence[Sequence[int]], where: str) -> None:
    for number, ids in enumerate(sentences, 1):
        if len(ids) >= LONGEST_SENTENCE:
            raise UserError(
                f"line {number:,} has {len(ids):,} tokens{where}, and a translation takes at most "
                f"{LONGEST_SENTENCE - 1:,}; split it into sentences"
            )


def _width(decode: DecodeConfig, count: int) -> int:
    """Return how many hypotheses of a sentence are computed in parallel.

    Raises UserError for an impossible count.
    """
    if count < 1:
        raise UserError(f"n_best is at least 1, got {count}")
    if decode.sample:
        return count
    if count > decode.beam:
        raise UserError(
            f"n_best is {count}, but a search gives at most as many as it has beams, {decode.beam}; "
            f"type --beam {count}, or --sample to draw them"
        )
    return decode.beam


def _search(
    model: Seq2Seq, source: Tensor, decode: DecodeConfig, bounds: Bounds, lines: list[int], width: int
) -> list[list[Hypothesis]]:
    """Return up to ``width`` hypotheses of each source row, whose numbers are ``lines``."""
    if not decode.sample:
        alpha, formula = decode.length_penalty, decode.length_penalty_formula
        return search(model, source, bounds, beams=decode.beam, length_penalty=alpha, formula=formula)
    seeds = [[derive(decode.sample_seed, "sample", line, k) for k in range(width)] for line in lines]
    return sample(model, source, seeds, bounds, choice_of(decode))


def _prefix_ids(tokenizer: Tokenizer, prefixes: Sequence[str], allowed: Tensor | None) -> list[list[int]]:
    """Return the ids of the prefixes. Raises UserError for a prefix that no output can produce."""
    known: dict[str, list[int]] = {}
    for text in dict.fromkeys(prefixes):
        (ids,) = tokenizer.encode_target([text])
        if UNK in ids:
            raise UserError(
                f"the prefix {text!r} has characters that the run's vocabulary does not have; leave them out"
            )
        masked = [i for i in ids if allowed is not None and not allowed[i]]
        if masked:
            raise UserError(
                f"the prefix {text!r} has {tokenizer.decode([masked])[0]!r}, which never occurs on the "
                f"target side of the training text, and target_vocab_mask rules out such pieces; leave it out"
            )
        known[text] = ids
    return [known[text] for text in prefixes]


def _prefix(ids: list[list[int]], device: torch.device) -> Tensor | None:
    """Return the prefixes `[B, P]`, padded with ``FREE``; None if all are empty."""
    width = max(map(len, ids))
    if not width:
        return None
    return torch.tensor([row + [FREE] * (width - len(row)) for row in ids], device=device)


def _search_batches(ids: list[list[int]], max_positions: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches of the non-empty rows, longest first: the rows' indices, and their ids `[B, S]` with EOS
    and padding.
    """
    order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: -len(ids[i]))
    while order:
        width = len(ids[order[0]]) + 1
        count = max(1, max_positions // width)
        rows, order = order[:count], order[count:]
        source = torch.full((len(rows), width), PAD)
        for i, row in enumerate(rows):
            source[i, : len(ids[row]) + 1] = torch.tensor([*ids[row], EOS])
        yield rows, source
