"""Translation: batches of sentence pairs, a label-smoothed loss, BLEU with beam search."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from normlab.base.metric import NLL, Metric
from normlab.base.model_config import derive
from normlab.base.units import perplexity
from normlab.lab.config import PARALLEL_TEXTS, Config, DecodeConfig
from normlab.lab.data.batches import Batch, PairBatches, dev_batches
from normlab.lab.data.parallel import LONGEST_SENTENCE, Corpus, prepare, require_lengths
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import plan_shapes
from normlab.lab.tasks.scores import (
    bleu_of_sums,
    corpus_bleu,
    require_bleu_tokens,
    score,
    sentence_statistics,
)
from normlab.lab.tasks.search import n_best_lines, width_of
from normlab.lab.tasks.task import Array, Evaluation, LossSum, Task, label_smoothed, repeated_share
from normlab.nn import PAD, Seq2Seq
from normlab.nn.model import evaluating

_SEARCHED_SENTENCES = 200
"""About one full batch of the search: with fewer, each sentence would seem to cost more than it does."""


class _Sums(NamedTuple):
    """Sums over the target tokens of a text, in nats."""

    nll: float
    loss: float
    """The label-smoothed loss."""
    tokens: int


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
        target_vocab = torch.from_numpy(corpus.target_vocab).to(device)
        self.allowed = target_vocab if config.data.target_vocab_mask else None
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
        dev = self.corpus.dev
        in_first = np.arange(len(dev)) < max(self.config.train.dev_decode_sentences, 2)
        first = dev.only(in_first)
        sums, rest = self._sums(model, first), self._sums(model, dev.only(~in_first))
        nll = (sums.nll + rest.nll) / (sums.tokens + rest.tokens)
        if len(dev) < 2:
            return nll, math.nan
        exchanged = self._sums(model, TokenPairs(first.source.shifted(), first.target))
        return nll, (exchanged.nll - sums.nll) / sums.tokens

    @torch.inference_mode()
    def _sums(self, model: Seq2Seq, pairs: TokenPairs, smoothing: float = 0.0) -> _Sums:
        """Return the sums over the target tokens of all pairs.

        Tokens that the mask excludes are left out: they would make both losses infinite for every model.
        """
        nll = loss = torch.zeros((), device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        with evaluating(model):
            for batch in dev_batches(pairs, 2 * self.config.train.max_tokens):
                batch = batch.to(self.device)
                logits = model(batch.source, batch.target_in)
                target = batch.target_out
                if self.allowed is not None:
                    target = target.masked_fill(~self.allowed[target], PAD)
                sums = label_smoothed(logits, target, smoothing, self.allowed, PAD)
                nll = nll + sums.nll
                loss = loss + sums.loss
                tokens += (target != PAD).sum()
        return _Sums(float(nll), float(loss), int(tokens))

    def dev_outputs(self, model: Seq2Seq, count: int | None = None) -> list[str]:
        """Return greedy translations of dev sentences, by default ``train.dev_decode_sentences`` of them."""
        source = self.corpus.dev_text.source[: count or self.config.train.dev_decode_sentences]
        return self._translate(model, source, DecodeConfig(beam=1))

    def dev_bleu(self, outputs: Sequence[str]) -> float:
        """Return sacreBLEU for translations of the first dev sentences."""
        references = self.corpus.dev_text.target[: len(outputs)]
        return corpus_bleu(outputs, references, target_lang=self.config.data.target_lang)

    def dev_scores(self, model: Seq2Seq) -> dict[str, float]:
        nll, exchange_cost = self.dev_nlls(model)
        outputs = self.dev_outputs(model)
        scores = {"nll": nll, "bleu": self.dev_bleu(outputs)}
        if len(self.corpus.dev) > 1:  # else there is no other source
            scores["nll_exchanged"] = nll + exchange_cost
        references = self.corpus.dev_text.target[: len(outputs)]
        scores["repeated_share"] = repeated_share(outputs, references)
        return scores

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
        best = n_best_lines(
            model,
            self.corpus.tokenizer,
            lines,
            decode,
            count=1,
            allowed=self.allowed,
            on_done=partial(self.advance, "translating"),
        )
        return [candidates[0].text for candidates in best]

    def _perplexities(self, model: Seq2Seq) -> dict[str, float]:
        r"""Return ``nll`` in nats per test token, ``perplexity`` :math:`e^{nll}`, and
        ``perplexity_smoothed``, :math:`e` to the mean label-smoothed loss with the smoothing of training.

        All depend on the run's tokenizer. References longer than ``LONGEST_SENTENCE`` or than the model's
        positions are left out; if none is left, the values are NaN.
        """
        text, tokenizer = self.corpus.test_text, self.corpus.tokenizer
        longest = min(model.position_encoding.longest or LONGEST_SENTENCE, LONGEST_SENTENCE)
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        encoded = zip(tokenizer.encode(text.source), tokenizer.encode_target(text.target), strict=True)
        for source, target in encoded:
            if max(len(source), len(target)) < longest:
                sources.append(source)
                targets.append(target)
        nll = loss = math.nan
        if sources:
            pairs = TokenPairs(Ragged.of(sources), Ragged.of(targets))
            sums = self._sums(model, pairs, self.config.optim.label_smoothing)
            nll, loss = sums.nll / sums.tokens, sums.loss / sums.tokens
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
        searching = time.perf_counter() - start - likelihood
        source, target = self.corpus.dev.source.lengths.mean(), self.corpus.dev.target.lengths.mean()
        # This model has hardly been trained, so its outputs end only at their maximal length.
        shortened = min(1.0, target / (self.config.decode.max_len_ratio * source + 10))
        sentence = searching / few * shortened
        beams = len(self.corpus.test_text) * width_of(self.config.decode, 1)
        return likelihood + searched * sentence, beams * sentence
