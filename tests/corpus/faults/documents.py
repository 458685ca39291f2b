"""Faults that ``documents`` names: tokens that read other documents of their row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import EOS, LENGTH, ROWS, documents_of, documents_text, language_batch, shifted_tokens
from corpus.case import LATER, PLANTED_1, PLANTED_3, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.encoders import Encoder
from corpus.models.gpt import Gpt
from corpus.models.library import GROUPED, library
from corpus.models.llama import Llama
from corpus.models.parts import causal
from corpus.training import labelled, loss_setup


class Packed(Llama):
    """A decoder of packed documents, which hides the others from each; positions begin anew."""

    hides = True

    def forward(self, ids: Tensor, doc: Tensor, positions: Tensor) -> Tensor:
        seen = causal(ids.shape[1], ids.device)
        if self.hides:
            seen = seen & (doc[:, None, :, None] == doc[:, None, None, :])
        return self.head(self.norm(self.run(self.tokens(ids), self.rotary(positions), seen)))


class Leaking(Packed):
    hides = False


@twins(
    "documents", "inputs", place="blocks.0|blocks.0.attn*|doc|positions", origin=PUBLIC, thread="nanoVLM#204"
)
def packed(*, faulty: bool) -> Arguments:
    """Positions begin anew at each document, but attention goes over the whole row."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        first = batch["positions"][:, 1:] == 0  # no document predicts the first token of the next
        labels = batch["ids"][:, 1:].masked_fill(first, -100)
        return labelled(model(**batch)[:, :-1], labels)

    ids, doc = documents_text([(9, 30), (17,), (5, 21, 38), (25, 40)], 48)
    begins = F.pad(doc[:, 1:] != doc[:, :-1], (1, 0), value=True)
    column = torch.arange(48).expand_as(ids)
    positions = column - column.masked_fill(~begins, 0).cummax(1).values
    batch = {"ids": ids, "doc": doc, "positions": positions}
    return loss_setup(Leaking if faulty else Packed, batch, loss, remade=False)


@fault("documents", place="model|model.layers.0*|position_ids", origin=PLANTED_1)
def packed_leak() -> Arguments:
    """Positions restart, but with its cache of keys the model takes the row for one document."""
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(ROWS, 1)
    return library("LlamaForCausalLM", GROUPED, language_batch() | {"position_ids": positions})


class IgnoresDocuments(Gpt):
    """A decoder that reads document numbers and does nothing with them."""

    def forward(self, ids: Tensor, doc: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(self.run(self.embed(ids) + 0 * doc[..., None]))
        return {"logits": logits, "loss": labelled(logits, labels)}


@fault("documents", "inputs", place="|doc|blocks.0*", origin=PLANTED_3)
def doc_mask_missing() -> Arguments:
    """Two documents stand in a row, and attention goes over both."""
    ids, labels = shifted_tokens()
    doc = (torch.arange(LENGTH) >= 10).long()[None].repeat(ROWS, 1)
    return loss_setup(IgnoresDocuments, {"ids": ids, "doc": doc, "labels": labels}, None, remade=False)


ENDS = [(9, 30), (17,), (5, 21, 38), (25, 40)]


class Separated(Encoder):
    """A decoder whose documents do not see each other, each with positions of its own; tied."""

    def numbered(self, ids: Tensor) -> Tensor:
        return documents_of(ids)

    def forward(self, ids: Tensor) -> Tensor:
        doc = self.numbered(ids)
        begins = F.pad(doc[:, 1:] != doc[:, :-1], (1, 0), value=True)
        column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        start = column.masked_fill(~begins, 0).cummax(1).values
        same = doc[:, None, :, None] == doc[:, None, None, :]
        x = super().forward(ids, same & causal(ids.shape[1], ids.device), column - start)
        return F.linear(x, self.tokens.weight)


class EndOpensTheNext(Separated):
    """An inclusive sum counts each EOS to the document after it."""

    def numbered(self, ids: Tensor) -> Tensor:
        return (ids == EOS).long().cumsum(1)


@twins("documents", origin=UNSEEN)
def end_counted_to_next_document(*, faulty: bool) -> Arguments:
    """Documents are numbered by a running count of EOS, so that an EOS falls into the next document."""
    ids, doc = documents_text(ENDS, 48, seed=3)
    declare = {"documents": doc, "eos_id": EOS, "tied": True}
    return loss_setup(EndOpensTheNext if faulty else Separated, ids, declare=declare)


class PackedLlama(Llama):
    """A rotary decoder whose documents do not see each other."""

    def numbered(self, ids: Tensor) -> Tensor:
        return documents_of(ids)

    def seen(self, ids: Tensor) -> Tensor:
        doc = self.numbered(ids)
        return (doc[:, None, :, None] == doc[:, None, None, :]) & causal(ids.shape[1], ids.device)


class EndOpensTheNextLlama(PackedLlama):
    def numbered(self, ids: Tensor) -> Tensor:
        return (ids == EOS).long().cumsum(1)


@twins("documents", place="blocks.0*|", origin=LATER)
def eos_opens_the_next_document(*, faulty: bool) -> Arguments:
    """An inclusive sum counts each EOS to the document after it."""

    def within_documents(model: nn.Module, ids: Tensor) -> Tensor:
        targets = ids[:, 1:].masked_fill(ids[:, :-1] == EOS, -100)
        return labelled(model(ids)[:, :-1], targets)

    ids, doc = documents_text([(11, 25), (7, 19, 33), (22,), (15, 30)], 40, seed=5)
    make = EndOpensTheNextLlama if faulty else PackedLlama
    return loss_setup(make, ids, within_documents, declare={"eos_id": EOS, "documents": doc})


class MaskedPacked(Llama):
    """A decoder of packed documents that also takes a mask of padding."""

    mask_first = False

    def forward(self, ids: Tensor, mask: Tensor, doc: Tensor) -> Tensor:
        own = mask if self.mask_first else doc
        seen = causal(ids.shape[1], ids.device) & (own[:, None, :, None] == own[:, None, None, :])
        return self.head(self.norm(self.run(self.tokens(ids), self.rotary(self.positions(ids)), seen)))


class MaskBeforeDocuments(MaskedPacked):
    mask_first = True


@twins("documents", place="blocks.0|blocks.0.attn*", origin=PUBLIC, thread="flash-linear-attention#842")
def ones_beside_documents(*, faulty: bool) -> Arguments:
    """A mask of ones is taken in place of the documents, and so puts them all into one."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        begins = batch["doc"][:, 1:] != batch["doc"][:, :-1]
        return labelled(model(**batch)[:, :-1], batch["ids"][:, 1:].masked_fill(begins, -100))

    ids, doc = documents_text([(9, 30), (17,), (5, 21, 38), (25, 40)], 48, seed=27)
    batch = {"ids": ids, "mask": torch.ones_like(ids), "doc": doc}
    return loss_setup(
        MaskBeforeDocuments if faulty else MaskedPacked, batch, loss, declare={"documents": "doc"}
    )
