"""Language modelling: blocks of plain text, a decoder that predicts each next token, perplexity."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from normlab.data.blocks import Blocks, TextBatch, blocks_in_order
from normlab.data.plain import Stream, TextCorpus, prepare_text
from normlab.errors import UserError
from normlab.init import profile_
from normlab.nn import PAD, Decoder
from normlab.spec.config import Config, DataConfig
from normlab.spec.metric import NLL, Metric
from normlab.spec.randomness import derive
from normlab.tasks.build import build_model
from normlab.tasks.loss import LossSum, label_smoothed
from normlab.tasks.task import Evaluation, Task


class LanguageModel(Task[TextCorpus, Decoder, TextBatch], name="language_model"):
    r""":math:`-\sum_i \log p(t_i \mid t_{i-L+1} \dots t_{i-1})`, within blocks of L tokens.

    Radford et al. 2018, Section 3.1 (Improving Language Understanding by Generative Pre-Training). A block's
    first token is predicted from the one before it alone, in training as on dev and test, so that a
    perplexity belongs to its ``data.block_len``.
    """

    texts = ("train_text", "dev_text", "test_text")
    stacks = ("decoder",)
    metrics = (
        Metric("bits_per_byte", "bits per byte", higher_is_better=False, digits=3, least=0.0),
        Metric("perplexity", "perplexity", "of a token", higher_is_better=False, digits=1, least=1.0),
        Metric("word_perplexity", "word perplexity", higher_is_better=False, digits=1, least=1.0),
        NLL,
    )

    def __init__(self, config: Config, corpus: TextCorpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        self.blocks = Blocks(
            corpus.train.tokens,
            block_len=config.data.block_len,
            rows=_rows(config),
            seed=config.seeds.data,
        )

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if not _rows(config):
            raise UserError(
                f"max_tokens is {config.train.max_tokens}, less than one block of {config.data.block_len}; "
                f"raise --max-tokens or lower --block-len"
            )
        if config.data.pretokenizer:
            raise UserError(
                f"data.pretokenizer is {config.data.pretokenizer!r}, and a language model reads its text as "
                f"it is, or its perplexity would be of another text; leave out --pretokenizer"
            )
        if config.data.target_vocab_mask:
            raise UserError(
                "target_vocab_mask leaves tokens out of the dev likelihood, and so out of a perplexity; "
                "set data.target_vocab_mask to false"
            )

    @staticmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, TextCorpus]:
        return prepare_text(config, root)

    def build(self) -> Decoder:
        """The model at its start, data-dependent parts profiled on the first batch."""
        model = build_model(
            Decoder, self.config.model, self.corpus.tokenizer.vocab_size, self.config.seeds.init
        )
        model.to(self.device)
        first = self.blocks.at(0).to(self.device)
        profile_(model, lambda: model.hidden(first.ids))
        return model

    def batch(self, index: int) -> TextBatch:
        seed = derive(self.config.seeds.data, "word_dropout")
        return self.blocks.at(index, word_dropout=self.config.data.word_dropout, seed=seed).to(self.device)

    def loss(self, model: Decoder, batch: TextBatch) -> LossSum:
        return label_smoothed(model(batch.ids), batch.target, self.config.optim.label_smoothing, None, PAD)

    def dev_scores(self, model: Decoder) -> dict[str, float]:
        return self._scores(model, self.corpus.dev)

    def test(self, model: Decoder) -> Evaluation:
        return Evaluation({**self._scores(model, self.corpus.test), "tokens": self.corpus.test.predicted})

    def rehearse(self, model: Decoder) -> tuple[float, float]:
        start = time.perf_counter()
        self.dev_scores(model)
        validation = time.perf_counter() - start
        return validation, validation * self.corpus.test.predicted / self.corpus.dev.predicted

    @torch.inference_mode()
    def _scores(self, model: Decoder, text: Stream) -> dict[str, float]:
        """``nll`` and ``perplexity`` of a token, and two that do not depend on the tokenizer: the
        ``word_perplexity`` and the ``bits_per_byte``.
        """
        was_training = model.training
        model.eval()
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in blocks_in_order(
            text.tokens, block_len=self.config.data.block_len, rows=2 * _rows(self.config)
        ):
            batch = batch.to(self.device)
            nll += label_smoothed(model(batch.ids), batch.target, 0.0, None, PAD).nll
        model.train(was_training)
        return {
            "nll": float(nll / text.predicted),
            "perplexity": float((nll / text.predicted).exp()),
            "word_perplexity": float((nll / text.words).exp()),
            "bits_per_byte": float(nll / text.bytes / math.log(2)),
        }


def _rows(config: Config) -> int:
    """Blocks of a micro-batch."""
    return config.train.max_tokens // config.data.block_len
