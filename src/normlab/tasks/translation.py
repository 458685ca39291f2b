"""Translation: batches of token pairs, label-smoothed loss, BLEU of a search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normlab.data.batches import Batch, Batches, dev_batches, plan_shapes
from normlab.data.prepare import Corpus, prepare
from normlab.data.tokenizer import Tokenizer
from normlab.init import profile_
from normlab.nn import PAD, Seq2Seq
from normlab.nn.decode import EOS, beam_search
from normlab.spec.config import Config, DataConfig, DecodeConfig
from normlab.spec.randomness import derive
from normlab.tasks.build import build_seq2seq
from normlab.tasks.loss import LossSum, label_smoothed
from normlab.tasks.scores import corpus_bleu, score
from normlab.tasks.task import Scored, Task

_SEARCHED_SENTENCES = 200
"""About one batch of the search at full size: fewer sentences would each seem dearer than they are."""


class Translation(Task[Corpus, Seq2Seq, Batch], name="translation"):
    """Pairs of sentences, label-smoothed loss, BLEU of a search."""

    texts = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")
    stacks = ("encoder", "decoder")
    best_by = ("bleu", "nll")

    def __init__(self, config: Config, corpus: Corpus, device: torch.device) -> None:
        super().__init__(config, corpus, device)
        source_lengths, target_lengths = corpus.train.lengths
        shapes = plan_shapes(source_lengths, target_lengths, config.train.max_tokens)
        self.batches = Batches(corpus.train, shapes, config.seeds.data)
        self.allowed = allowed_types(config, corpus.target_types, device)

    @staticmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, Corpus]:
        return prepare(config, root)

    def build(self) -> Seq2Seq:
        """The model at its start, data-dependent parts profiled on the first batch."""
        model = build_seq2seq(self.config.model, self.corpus.tokenizer.vocab_size, self.config.seeds.init)
        model.to(self.device)
        first = self.batches.at(0).to(self.device)
        profile_(model, lambda: model.hidden(first.source, first.target_in))
        return model

    def batch(self, index: int) -> Batch:
        """The ``index``-th micro-batch of training, on the device."""
        seed = derive(self.config.seeds.data, "word_dropout")
        batch = self.batches.at(index, word_dropout=self.config.data.word_dropout, seed=seed)
        return batch.to(self.device)

    def loss(self, model: Seq2Seq, batch: Batch) -> LossSum:
        """Summed over the batch's real target tokens."""
        logits = model(batch.source, batch.target_in)
        smoothing = self.config.optim.label_smoothing
        return label_smoothed(logits, batch.target_out, smoothing, self.allowed, PAD)

    @torch.inference_mode()
    def dev_nll(self, model: Seq2Seq) -> float:
        """Negative log-likelihood in nats per dev token, without smoothing.

        Tokens of types that the mask rules out are left out: they would make it infinite for every model.
        """
        total = torch.zeros((), device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in dev_batches(self.corpus.dev, 2 * self.config.train.max_tokens):
            batch = batch.to(self.device)
            logits = model(batch.source, batch.target_in)
            target = batch.target_out
            if self.allowed is not None:
                target = target.masked_fill(~self.allowed[target], PAD)
            total += label_smoothed(logits, target, 0.0, self.allowed, PAD).nll
            tokens += (target != PAD).sum()
        return float(total) / int(tokens)

    def dev_bleu(self, model: Seq2Seq, count: int | None = None) -> float:
        """sacreBLEU of greedy search on the first ``count`` dev pairs, ``dev_bleu_sentences`` if None."""
        pairs, count = self.corpus.dev_text, count or self.config.train.dev_bleu_sentences
        greedy = DecodeConfig(beam=1)
        hypotheses = translate_lines(
            model, self.corpus.tokenizer, pairs.source[:count], greedy, allowed=self.allowed
        )
        return corpus_bleu(hypotheses, pairs.target[:count])

    def dev_scores(self, model: Seq2Seq) -> dict[str, float]:
        return {"nll": self.dev_nll(model), "bleu": self.dev_bleu(model)}

    def test(self, model: Seq2Seq) -> Scored:
        """Scores of the beam search's translations, and these."""
        pairs = self.corpus.test_text
        hypotheses = translate_lines(
            model, self.corpus.tokenizer, pairs.source, self.config.decode, allowed=self.allowed
        )
        return Scored(vars(score(hypotheses, pairs.target)), hypotheses)

    def rehearse(self, model: Seq2Seq) -> tuple[float, float]:
        """The real likelihood, and a greedy search of some dev sentences, scaled to all of them; the beam
        search of the test takes as long for each of its sentences and beams.
        """
        searched = min(self.config.train.dev_bleu_sentences, len(self.corpus.dev_text))
        few = min(searched, _SEARCHED_SENTENCES)
        start = time.perf_counter()
        self.dev_nll(model)
        likelihood = time.perf_counter() - start
        self.dev_bleu(model, few)
        sentence = (time.perf_counter() - start - likelihood) / few
        beams = len(self.corpus.test_text) * self.config.decode.beam
        return likelihood + searched * sentence, beams * sentence


def allowed_types(config: Config, target_types: np.ndarray, device: torch.device) -> Tensor | None:
    """`[V]` mask of the types that may be produced, or None where the configuration masks nothing."""
    if not config.data.target_vocab_mask:
        return None
    return torch.from_numpy(np.array(target_types)).to(device)


def translate_lines(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    decode: DecodeConfig,
    *,
    allowed: Tensor | None = None,
    max_positions: int = 4096,
) -> list[str]:
    """Translations of raw lines, in their order. An empty line stays empty."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    outputs = [""] * len(lines)
    for rows, source in _search_batches(tokenizer.encode(list(lines)), max_positions // decode.beam):
        found = beam_search(
            model,
            source.to(device),
            beams=decode.beam,
            length_penalty=decode.length_penalty,
            max_len_ratio=decode.max_len_ratio,
            allowed=allowed,
        )
        for row, text in zip(rows, tokenizer.decode(found), strict=True):
            outputs[row] = text
    model.train(was_training)
    return outputs


def _search_batches(ids: list[list[int]], max_positions: int) -> Iterator[tuple[list[int], Tensor]]:
    """Non-empty rows by length, longest first, as `[B, S]` with EOS and padding; the rows' places beside
    them.
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
