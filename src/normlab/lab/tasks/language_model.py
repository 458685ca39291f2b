"""Language modelling: blocks of plain text, a decoder that predicts each next token, bits per byte."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.metric import NLL, Metric
from normlab.base.model_config import derive
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig
from normlab.lab.data import plain
from normlab.lab.data.tokenizer import EOS
from normlab.lab.tasks.task import (
    Array,
    Evaluation,
    LossSum,
    Task,
    choice_of,
    label_smoothed,
    rows_of,
    z_loss,
)
from normlab.nn import PAD, Decoder
from normlab.nn.decode import generate
from normlab.nn.model import evaluating

BITS_PER_BYTE: Final = "bits_per_byte"
PROMPTS = 6
"""Number of test documents that are continued and shown as samples."""
PROMPT_TOKENS = 16
"""The most tokens of a prompt."""
CONTINUATION_TOKENS = 48


class LanguageModel(Task[plain.TextCorpus, Decoder, plain.TextBatch], name="language_model"):
    r""":math:`-\sum_i \log p(t_i \mid t_{i-L+1} \dots t_{i-1})`, within blocks of L tokens.

    Radford et al. 2018, Section 3.1 (Improving Language Understanding by Generative Pre-Training). A block's
    first token is predicted only from the one before it, in training and on dev and test, so a perplexity
    belongs to its ``data.block_len``.

    Scores are resampled by document, see ``text.document_sizes``. Bits per byte are computed if decoding
    restores the text byte for byte; the tokens that end documents count, but stand for no bytes.
    """

    texts = ("train_text", "dev_text", "test_text")
    stacks = ("decoder",)
    example_labels = ("prompt", "continuation")
    metrics = (
        Metric(BITS_PER_BYTE, "bits per byte", higher_is_better=False, digits=3, least=0.0),
        Metric("perplexity", "perplexity", "of a token", higher_is_better=False, digits=1, least=1.0),
        Metric("word_perplexity", "word perplexity", higher_is_better=False, digits=1, least=1.0),
        NLL,
    )
    rate_metric = metrics[0]

    def __init__(self, config: Config, corpus: plain.TextCorpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        self.blocks = plain.Blocks(
            corpus.train.tokens, block_len=config.data.block_len, rows=rows_of(config), seed=config.seeds.data
        )

    @classmethod
    def metrics_on(cls, corpus: plain.TextCorpus) -> tuple[Metric, ...]:
        if not corpus.lost:
            return cls.metrics
        return tuple(metric for metric in cls.metrics if metric.name != BITS_PER_BYTE)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        cls.require_a_block(config)
        if config.data.pretokenizer:
            raise UserError(
                f"data.pretokenizer is {config.data.pretokenizer!r}, and a language model reads its text as "
                f"it is, or its perplexity would be that of another text; leave out --pretokenizer"
            )
        if config.data.target_vocab_mask:
            raise UserError(
                "target_vocab_mask leaves tokens out of the NLL, and so out of a perplexity; "
                "set data.target_vocab_mask to false"
            )

    check_lengths = staticmethod(plain.require_block_len)

    @classmethod
    def check_text(cls, config: Config, corpus: plain.TextCorpus) -> None:
        super().check_text(config, corpus)
        if config.data.document_mask and corpus.by_line:
            raise UserError(
                f"--document-mask keeps documents apart, but {corpus.tokenizer.kind} ends every line as it "
                f"ends a document; type --tokenizer byte_bpe"
            )
        if corpus.lost and config.train.best_by == BITS_PER_BYTE:
            raise UserError(
                f"train.best_by is {BITS_PER_BYTE!r}, and {_no_bits(corpus)}; or set train.best_by to 'nll'"
            )

    @staticmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, plain.TextCorpus]:
        """Prepare the text; if bits per byte are not computed, its facts say why."""
        config, corpus = plain.prepare_text(config, root)
        if not corpus.lost:
            return config, corpus
        warning = _no_bits(corpus)
        return config, replace(corpus, warning=warning, facts={**corpus.facts, "Bits per byte": warning})

    def build(self) -> Decoder:
        return self.initialised(Decoder, self.corpus.tokenizer.vocab_size, self.blocks.at(0).ids)

    def batch(self, index: int) -> plain.TextBatch:
        seed = derive(self.config.seeds.data, "word_dropout")
        return self.blocks.at(index, word_dropout=self.config.data.word_dropout, seed=seed).to(self.device)

    def loss(self, model: Decoder, batch: plain.TextBatch) -> LossSum:
        optim, logits = self.config.optim, self._logits(model, batch.ids)
        sums = label_smoothed(logits, batch.target, optim.label_smoothing, None, PAD)
        if not optim.z_loss:
            return sums
        return replace(sums, loss=sums.loss + optim.z_loss * z_loss(logits, batch.target, PAD))

    def _logits(self, model: Decoder, ids: Tensor) -> Tensor:
        """Return the logits `[B, T, V]`; with ``data.document_mask`` each EOS begins a document."""
        if not self.config.data.document_mask:
            return model(ids)
        return model(ids, (ids == EOS).cumsum(1))

    def dev_scores(self, model: Decoder) -> dict[str, float]:
        return self._scores(model, self.corpus.dev)

    def test(self, model: Decoder) -> Evaluation:
        """Score the test text by document, and continue the beginnings of a few documents."""
        text = self.corpus.test
        nats: list[Array] = []
        scores = self._scores(model, text, nats)
        self.advance("sampling", 0.0)
        return Evaluation(
            scores={**scores, "tokens": len(text)},
            outputs=self._continuations(model, _prompts(self.corpus, self.config.data.block_len)),
            examples=self._by_document(np.concatenate(nats)),
        )

    @classmethod
    def test_examples(cls, config: Config, corpus: plain.TextCorpus) -> Sequence[tuple[str, str]]:
        prompts = _prompts(corpus, config.data.block_len)
        return [(text, "") for text in _texts(corpus, [ids[1:] for ids in prompts])]

    @classmethod
    def combine(cls, metric: str, sums: Array) -> Array:
        """Return the score from nats and the number of tokens, words or bytes that they belong to."""
        mean = sums[..., 0] / sums[..., 1]
        if metric == BITS_PER_BYTE:
            return mean / math.log(2)
        return mean if metric == NLL.name else np.exp(mean)

    def _by_document(self, nats: Array) -> dict[str, Array]:
        """Return, by metric, the nats of each test document and its size in the unit, `[documents, 2]`."""
        tokens, words, size = self.corpus.documents.T
        nats_of_documents = np.add.reduceat(nats, np.cumsum(tokens) - tokens)
        sizes = {BITS_PER_BYTE: size, "perplexity": tokens, "word_perplexity": words, NLL.name: tokens}
        examples: dict[str, Array] = {}
        for metric in self.metrics_on(self.corpus):
            columns = [nats_of_documents, sizes[metric.name]]
            examples[metric.name] = np.stack(columns, axis=1).astype(np.float64)
        return examples

    def rehearse(self, model: Decoder) -> tuple[float, float]:
        """Time dev scores as in a validation and as in a test, and the continuation of one prompt."""
        start = time.perf_counter()
        self.dev_scores(model)
        validated = time.perf_counter()
        self._scores(model, self.corpus.dev, [])
        scored = time.perf_counter()
        prompts = _prompts(self.corpus, self.config.data.block_len)
        self._continuations(model, prompts[:1])
        continued = time.perf_counter() - scored
        test = (scored - validated) * len(self.corpus.test) / len(self.corpus.dev)
        return validated - start, test + continued * len(prompts)

    def _continuations(self, model: Decoder, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Sample a continuation of each prompt; only the sampling seed and the prompt's number affect it."""
        decode, window = self.config.decode, self.config.data.block_len
        choose = choice_of(decode)
        continuations: list[list[int]] = []
        with evaluating(model):
            for number, ids in enumerate(prompts):
                seed = derive(decode.sample_seed, "continue", number)
                (drawn,) = generate(model, ids, [seed], choose, count=CONTINUATION_TOKENS, window=window)
                continuations.append(drawn.tolist())
        return _texts(self.corpus, continuations)

    @torch.inference_mode()
    def _scores(
        self, model: Decoder, text: plain.Stream, nats: list[Array] | None = None
    ) -> dict[str, float]:
        """Compute ``nll`` and ``perplexity`` per token, and ``word_perplexity`` and ``bits_per_byte``, which
        do not depend on the tokenizer; the last only if none of the text is lost. The nats of every token are
        appended to ``nats``.
        """
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        length, rows = self.config.data.block_len, 2 * rows_of(self.config)
        with evaluating(model):
            for batch in plain.blocks_in_order(text.tokens, block_len=length, rows=rows):
                batch = batch.to(self.device)
                logits, target = self._logits(model, batch.ids), batch.target.flatten()
                nll += label_smoothed(logits, batch.target, 0.0, None, PAD).nll
                if nats is not None:
                    nats_of_batch = F.cross_entropy(logits.float().flatten(0, 1), target, reduction="none")
                    nats.append(nats_of_batch[target != PAD].double().cpu().numpy())
        scores = {
            "nll": float(nll / len(text)),
            "perplexity": float((nll / len(text)).exp()),
            "word_perplexity": float((nll / text.words).exp()),
            BITS_PER_BYTE: float(nll / text.bytes / math.log(2)),
        }
        known = {metric.name for metric in self.metrics_on(self.corpus)}
        return {name: score for name, score in scores.items() if name in known}


def _no_bits(corpus: plain.TextCorpus) -> str:
    return f"bits per byte are not computed, since the tokenizer loses a part of the text: {corpus.lost}"


def _prompts(corpus: plain.TextCorpus, block_len: int) -> list[list[int]]:
    """Return the beginnings of a few evenly spread test documents, each after the token before it."""
    sizes = corpus.documents[:, 0]
    chosen = np.unique(np.linspace(0, len(sizes) - 1, PROMPTS).astype(int))
    starts = (np.cumsum(sizes) - sizes)[chosen]
    most = max(1, min(PROMPT_TOKENS, block_len // 2))  # the context has room for a continuation
    stops = starts + np.minimum(sizes[chosen], most) + 1
    return [np.asarray(corpus.test.tokens[a:b]).tolist() for a, b in zip(starts, stops, strict=True)]


def _texts(corpus: plain.TextCorpus, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode each row as one line of text, with an arrow at the end of each original line or document."""
    texts = []
    for row in rows:
        parts = [list(ids) for is_end, ids in groupby(row, lambda token: token == EOS) if not is_end]
        text = "\n".join(corpus.tokenizer.decode(parts))
        texts.append(text.replace("\n", " ↵ "))
    return texts
