"""BERT's pre-training: masked language modelling and next-sentence prediction on plain text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.metric import NLL, Metric
from normlab.base.model_config import derive
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig
from normlab.lab.data.batches import TensorBatch
from normlab.lab.data.corpus import count_facts
from normlab.lab.data.plain import Stream, TextCorpus, prepare_text, require_block_len
from normlab.lab.data.ragged import Ints
from normlab.lab.data.readings import ByLine
from normlab.lab.data.sentence_pairs import (
    MASKED,
    SPECIAL_TOKENS,
    Shuffled,
    Spans,
    mask_tokens,
    word_beginnings,
)
from normlab.lab.data.tokenizer import EOS
from normlab.lab.tasks.task import Array, Evaluation, LossSum, Task, label_smoothed, rows_of
from normlab.nn import PAD, Encoder
from normlab.nn.model import evaluating


@dataclass(frozen=True)
class BertBatch(TensorBatch):
    """One micro-batch of pairs of segments."""

    ids: Tensor
    """`[B, W]`: [CLS] A [SEP] B [SEP], masked."""
    segments: Tensor
    """`[B, W]`."""
    positions: Tensor
    """`[B, P]`: the places to predict."""
    targets: Tensor
    """`[B, P]`: the tokens there, then PAD if fewer are predicted."""
    random: Tensor
    """`[B]`: 1 if B comes from another document."""
    tokens: int
    """The number of tokens to predict."""

    @property
    def padded_tokens(self) -> int:
        return self.ids.numel()

    def recounted(self) -> BertBatch:
        """Return the batch with its tokens counted anew, after it was cut or changed from another."""
        return replace(self, tokens=int((self.targets != PAD).sum()))


class BertPretraining(Task[TextCorpus, Encoder, BertBatch], name="bert_pretraining"):
    r""":math:`\frac{1}{M} \sum_{i \in M} -\log p(t_i \mid \tilde t, B) + \frac{1}{R} \sum_r -\log p(n_r \mid
    \tilde t)`: the mean over the M masked tokens of a batch and the mean over its R pairs of segments.

    Devlin et al. 2019, Section 3.1 (arXiv 1810.04805). As everywhere, the loss is a sum over (masked) tokens:
    the mean over the pairs enters a micro-batch's sum once for each of its masked tokens. Both are therefore
    means, even over several micro-batches, which are weighted by their masked tokens. Masks and pairs are
    drawn anew at every step, from (seed, purpose, step), but only once for dev and test. There, every token
    to predict is masked: training replaces a tenth of them by random tokens and leaves a tenth unchanged, and
    a model that copies these without looking at the context gets half of them right. Ends of lines are not
    tokens here. Scores are resampled by document, see ``text.document_sizes``.
    """

    texts = ("train_text", "dev_text", "test_text")
    stacks = ("encoder",)
    metrics = (
        replace(NLL, label="masked-LM NLL", unit="nats per masked token"),
        Metric("masked_accuracy", "masked accuracy", "%", least=0.0, most=100.0),
        Metric("next_sentence_accuracy", "next-sentence accuracy", "%", least=0.0, most=100.0),
    )

    def __init__(self, config: Config, corpus: TextCorpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        self.spans = self._spans(corpus.train)
        self.order = Shuffled(len(self.spans), rows=rows_of(config), seed=config.seeds.data)
        self.begins = word_beginnings(corpus.tokenizer) if config.data.whole_word_masking else None
        """Which entries begin a word, `[V]`; None if words are not masked as a whole."""

    check_lengths = staticmethod(require_block_len)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        data = config.data
        if data.block_len < SPECIAL_TOKENS + 2:
            raise UserError(
                f"block_len is {data.block_len}, but two segments with their special tokens have at least "
                f"{SPECIAL_TOKENS + 2} tokens; raise --block-len"
            )
        cls.require_a_block(config)
        for name in ("pretokenizer", "word_dropout", "target_vocab_mask"):
            if value := getattr(data, name):
                raise UserError(
                    f"data.{name} is {value!r}, and masked language modelling reads its text as it is and "
                    f"predicts all tokens of it; leave {name} at its default"
                )

    @staticmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, TextCorpus]:
        """Prepare the text as for a language model; the unigram entropy is without ends of lines."""
        config, corpus = prepare_text(config, root, ByLine())
        tokens = np.asarray(corpus.train.tokens)
        counts = np.bincount(tokens, minlength=corpus.tokenizer.vocab_size)[EOS + 1 :]
        entropy = count_facts(counts)["unigram_entropy_nats"]
        facts = {
            "Unigram entropy": f"{entropy:.3f} nats a token",
            "Commonest token": f"{100 * (counts.max() / counts.sum()):.1f}% of the training text",
        }
        return config, replace(corpus, unigram_entropy_nats=entropy, facts=corpus.facts | facts)

    def build(self) -> Encoder:
        """Build the initialised model, with data-dependent initialisation on the first batch. Its vocabulary
        has one extra entry, the mask.
        """
        first = self.batch(0)
        return self.initialised(Encoder, self.corpus.tokenizer.vocab_size + 1, first.ids, first.segments)

    def batch(self, index: int) -> BertBatch:
        seed = self.config.seeds.data
        pairs = self.spans.pairs(self.order.at(index), derive(seed, "segments", index))
        return self._masked(*pairs, seed=derive(seed, "masking", index)).to(self.device)

    def loss(self, model: Encoder, batch: BertBatch) -> LossSum:
        token_logits, sentence_logits = model(batch.ids, batch.segments, batch.positions)
        smoothing = self.config.optim.label_smoothing
        masked = label_smoothed(token_logits, batch.targets, smoothing, None, PAD)
        return LossSum(
            masked.loss + batch.tokens * F.cross_entropy(sentence_logits.float(), batch.random), masked.nll
        )

    def dev_scores(self, model: Encoder) -> dict[str, float]:
        return self.scores_of(self._examples(model, self._dev))

    def test(self, model: Encoder) -> Evaluation:
        """Score the test text by document."""
        spans = self._spans(self.corpus.test)
        examples = self._examples(model, self._fixed(spans))
        _, document = np.unique(spans.document, return_inverse=True)
        by_document: dict[str, Array] = {}
        for name, rows in examples.items():
            sums = [np.bincount(document, column).astype(np.float64) for column in rows.T]
            by_document[name] = np.stack(sums, axis=1)
        return Evaluation(self.scores_of(examples), examples=by_document)

    def _spans(self, stream: Stream) -> Spans:
        return Spans.of(stream.tokens, span_len=self.config.data.block_len - SPECIAL_TOKENS)

    def _masked(
        self, ids: Ints, segments: Ints, random: Ints, *, seed: int, masked: float = MASKED
    ) -> BertBatch:
        mask, begins = self.corpus.tokenizer.vocab_size, self.begins
        ids, positions, targets = mask_tokens(ids, mask=mask, begins=begins, seed=seed, masked=masked)
        arrays = (ids, segments, positions, targets, random)
        return BertBatch(*map(torch.from_numpy, arrays), tokens=0).recounted()

    def _fixed(self, spans: Spans) -> BertBatch:
        """Return all spans of a held-out text, the same for all seeds of a run."""
        pairs = spans.pairs(np.arange(len(spans)), derive(0, "held-out segments"))
        return self._masked(*pairs, seed=derive(0, "held-out masking"), masked=1.0)

    @cached_property
    def _dev(self) -> BertBatch:
        return self._fixed(self._spans(self.corpus.dev))

    @torch.inference_mode()
    def _examples(self, model: Encoder, text: BertBatch) -> dict[str, Array]:
        """Return the sum and the weight of each score in each row of a text, `[rows, 2]`."""
        rows: list[Tensor] = []
        parts = [tensor.split(2 * rows_of(self.config)) for tensor in text.tensors().values()]
        with evaluating(model):
            for part in zip(*parts, strict=True):
                batch = BertBatch(*part, tokens=0).recounted().to(self.device)
                logits, sentence_logits = model(batch.ids, batch.segments, batch.positions)
                given = batch.targets != PAD
                nlls = F.cross_entropy(logits.float().transpose(1, 2), batch.targets, reduction="none")
                right = (logits.argmax(-1) == batch.targets) & given
                sentence_right = sentence_logits.argmax(-1) == batch.random
                columns = (
                    (nlls * given).double().sum(1),
                    given.sum(1),
                    100 * right.sum(1),
                    100 * sentence_right,
                )
                rows.append(torch.stack([column.double() for column in columns], 1).cpu())
        nll, count, right, sentence_right = torch.cat(rows).numpy().T
        masked_lm, masked_accuracy, next_sentence = (metric.name for metric in self.metrics)
        return {
            masked_lm: np.stack([nll, count], axis=1),
            masked_accuracy: np.stack([right, count], axis=1),
            next_sentence: np.stack([sentence_right, np.ones_like(sentence_right)], axis=1),
        }
