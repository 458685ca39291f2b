"""Faults that ``finite`` names: a loss or a gradient that is no number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corpus.batches import PAD, VOCAB, padded_text
from corpus.case import DEEP, LATER, PLANTED_2, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, deep_llama, planted
from corpus.models.gpt import Attention
from corpus.models.library import padded_llama
from corpus.models.llama import Llama, Rms, llama_of
from corpus.models.parts import becomes, draw
from corpus.places import FIRST_ATTENTION, LLAMA_LABELS, within
from corpus.training import changed, loss_setup, next_real_token


@fault("finite", "buffers", place="model.rotary_emb*", origin=PLANTED_2)
def nan_buffer() -> Arguments:
    """One frequency of the rotary embedding is not a number."""
    arguments = padded_llama()
    arguments["model"].model.rotary_emb.inv_freq[3] = float("nan")
    return arguments


class RootRms(Rms):
    """The division by the root, to which eps is added afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


@twins("finite", place="blocks.0*|tokens*|", origin=LATER)
def root_of_a_zero_token(*, faulty: bool) -> Arguments:
    """The gradient of the root of zero is infinite at the padding, and the projection's is not a number."""

    def narrow_embeddings(model: Llama) -> None:
        """Widen narrow embeddings by a projection without bias, which leaves the padding's zero."""
        table = nn.Embedding(VOCAB, 24, padding_idx=PAD)
        model.tokens = nn.Sequential(table, nn.Linear(24, 64, bias=False)).apply(draw)
        table.weight.data[PAD] = 0

    make = changed(narrow_embeddings, llama_of(norm=RootRms if faulty else Rms))
    ids, _ = padded_text([24, 17, 21, 12], seed=1)
    return loss_setup(make, {"ids": ids}, next_real_token, declare={"pad_id": PAD})


class HidesItself(Attention):
    def sees(self, length: int, device: torch.device) -> Tensor:
        return super().sees(length, device).tril(-1)


@fault("finite", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def causal_mask_hides_the_token_itself(training: Training) -> None:
    """torch.triu without diagonal=1 masks the token itself, too: the first has no key left, hence NaN."""
    for block in training.model.blocks:
        becomes(block.attn, HidesItself)


@fault("finite", "gradients", "overfit", place=f"|{within('bert')}", origin=DEEP)
@planted(deep_bert)
def dropout_of_one(training: Training) -> None:
    """All hidden dropouts are 1.0, so that nothing is left in training."""
    for path, module in training.model.named_modules():
        if path.endswith((".output.dropout", "embeddings.dropout")):
            module.p = 1.0


@fault("finite", "counted", "targets", place=f"|{LLAMA_LABELS}", origin=DEEP)
@planted(deep_llama)
def every_label_ignored(training: Training) -> None:
    """The collator did not find the answer's template and set all labels to -100: the loss is 0 / 0."""
    training.batch["labels"] = torch.full_like(training.batch["labels"], -100)
