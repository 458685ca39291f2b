"""Classification of pairs of sentences, fine-tuned from BERT's pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from normlab.base.metric import NLL, Metric
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.data.batches import TensorBatch
from normlab.lab.data.labelled import Labelled, LabelledCorpus, prepare_labelled
from normlab.lab.data.plain import require_block_len
from normlab.lab.data.ragged import Ints
from normlab.lab.data.sentence_pairs import SPECIAL_TOKENS, Shuffled, joined
from normlab.lab.tasks.task import Array, Evaluation, LossSum, Task, label_smoothed, rows_of
from normlab.nn import PairClassifier
from normlab.nn.model import evaluating


@dataclass(frozen=True)
class PairBatch(TensorBatch):
    """One micro-batch of pairs of sentences."""

    ids: Tensor
    """`[B, W]`: [CLS] first [SEP] second [SEP]."""
    segments: Tensor
    labels: Tensor
    """`[B]`."""

    @property
    def tokens(self) -> int:
        """The number of labels to predict."""
        return len(self.labels)

    @property
    def padded_tokens(self) -> int:
        return self.ids.numel()


class Classification(Task[LabelledCorpus, PairClassifier, PairBatch], name="classification"):
    r""":math:`-\log p(y \mid a, b)`, the label of a pair of sentences.

    Devlin et al. 2019, Section 4.1 and Appendix A.3 (arXiv 1810.04805). A pair of more than
    ``data.block_len`` tokens loses the last ones of its longer sentence. A run begins with the weights of a
    ``bert_pretraining`` run, except its heads, and with a new classifier. F1 is that of the last label in
    alphabetical order, such as 1 in MRPC.
    """

    texts = ("train_pairs", "dev_pairs", "test_pairs")
    stacks = ("encoder",)
    has_source = True
    new_parameters = ("classifier.",)
    dropped_parameters = ("transform.", "transform_norm.", "token_bias", "next_sentence.")
    metrics = (
        Metric("accuracy", "accuracy", "%", least=0.0, most=100.0),
        Metric("f1", "F1", "%", least=0.0, most=100.0),
        replace(NLL, unit="nats per pair"),
    )

    def __init__(self, config: Config, corpus: LabelledCorpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        self.order = Shuffled(len(corpus.train), rows=rows_of(config), seed=config.seeds.data)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        data = config.data
        if not data.train_pairs:
            raise UserError(
                "a classification reads pairs of sentences with labels, and there are none; type "
                "--train-pairs FILE.tsv#FIRST,SECOND,LABEL, or with --config mrpc or rte"
            )
        if not data.tokenizer and not config.train.init_from:
            raise UserError(
                "a classification begins with the weights and the tokenizer of a pre-trained run; name one: "
                "--init-from RUN, or train from scratch with a tokenizer of its own: --tokenizer bpe"
            )
        if data.block_len < SPECIAL_TOKENS + 2 or config.train.max_tokens < data.block_len:
            raise UserError(
                f"block_len is {data.block_len} and max_tokens {config.train.max_tokens}; an input has at "
                f"least {SPECIAL_TOKENS + 2} tokens, and a batch at least one input: raise "
                "--block-len or --max-tokens"
            )

    check_lengths = staticmethod(require_block_len)
    prepare = staticmethod(prepare_labelled)

    def build(self) -> PairClassifier:
        """Build the initialised model, with data-dependent initialisation on the first batch. Its vocabulary
        has the mask of the pre-training.
        """
        kind = partial(PairClassifier, labels=len(self.corpus.labels))
        first = self.batch(0)
        return self.initialised(kind, self.corpus.tokenizer.vocab_size + 1, first.ids, first.segments)

    def batch(self, index: int) -> PairBatch:
        return self._batch(self.corpus.train, self.order.at(index)).to(self.device)

    def loss(self, model: PairClassifier, batch: PairBatch) -> LossSum:
        logits = model(batch.ids, batch.segments)[:, None]
        return label_smoothed(logits, batch.labels[:, None], self.config.optim.label_smoothing, None, -1)

    def dev_scores(self, model: PairClassifier) -> dict[str, float]:
        """Return the scores on dev; ``nll_exchanged`` is the NLL when each label is paired with the previous
        example's sentences.
        """
        dev = self.corpus.dev
        log_p = self._log_p(model, dev)
        scores = self.scores_of(_examples_of(log_p, dev.labels))
        if len(dev) > 1:
            shifted = _examples_of(np.roll(log_p, 1, axis=0), dev.labels)
            scores["nll_exchanged"] = self.scores_of(shifted)["nll"]
        return scores

    def test(self, model: PairClassifier) -> Evaluation:
        log_p = self._log_p(model, self.corpus.test)
        examples = _examples_of(log_p, self.corpus.test.labels)
        outputs = [self.corpus.labels[i] for i in log_p.argmax(-1)]
        return Evaluation(self.scores_of(examples), outputs, examples)

    @classmethod
    def test_examples(cls, config: Config, corpus: LabelledCorpus) -> Sequence[tuple[str, str]]:
        text, labels = corpus.test_text, corpus.test.labels.tolist()
        sentences = zip(text.source, text.target, labels, strict=True)
        return [(f"{first} | {second}", corpus.labels[label]) for first, second, label in sentences]

    @classmethod
    def combine(cls, metric: str, sums: Array) -> Array:
        """Return the score; F1 is :math:`2 t / (2 t + f + m)` of true, false and missed positives."""
        if metric != "f1":
            return super().combine(metric, sums)
        right, false, missed = (sums[..., i] for i in range(3))
        return 200 * right / np.maximum(2 * right + false + missed, 1)

    def _batch(self, split: Labelled, chosen: Ints) -> PairBatch:
        most = self.config.data.block_len
        first, second = split.pairs.source, split.pairs.target
        pairs = [cut(first[row], second[row], most - SPECIAL_TOKENS) for row in chosen.tolist()]
        ids, segments = joined(pairs, most=most)
        return PairBatch(*map(torch.from_numpy, (ids, segments, split.labels[chosen])))

    @torch.inference_mode()
    def _log_p(self, model: PairClassifier, split: Labelled) -> Array:
        """Return the log-probability of each label for each pair, `[pairs, labels]`."""
        rows = 2 * rows_of(self.config)  # twice those of training, which also holds gradients
        logits: list[Tensor] = []
        with evaluating(model):
            for start in range(0, len(split), rows):
                chosen = np.arange(start, min(start + rows, len(split)))
                batch = self._batch(split, chosen).to(self.device)
                logits.append(model(batch.ids, batch.segments).double().cpu())
        return F.log_softmax(torch.cat(logits), -1).numpy()


def cut(first: list[int], second: list[int], most: int) -> tuple[list[int], list[int]]:
    """Return both sentences, cut to at most ``most`` tokens in total; the longer one loses its last ones."""
    while len(first) + len(second) > most:
        (first if len(first) > len(second) else second).pop()
    return first, second


def _examples_of(log_p: Array, labels: NDArray[np.int64]) -> dict[str, Array]:
    """Return the sufficient statistics of each pair: right or wrong, kind of error, log-likelihood."""
    answers, ones = log_p.argmax(-1), np.ones(len(labels))
    positive = log_p.shape[1] - 1
    given, chosen = labels == positive, answers == positive
    nll = -np.take_along_axis(log_p, labels[:, None], 1)[:, 0]
    return {
        "accuracy": np.stack([100.0 * (answers == labels), ones], 1),
        "f1": np.stack([given & chosen, chosen & ~given, given & ~chosen], 1).astype(np.float64),
        "nll": np.stack([nll, ones], 1),
    }
