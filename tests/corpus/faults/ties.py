"""Faults that ``ties`` names: parameters that ought to be one and are two, or the other way round."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from corpus.batches import VOCAB, text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PUBLIC, UNSEEN, Arguments, fault, sound, twins
from corpus.models.deep import LAYERS, Training, deep_bert, deep_llama, planted
from corpus.models.gpt import Gpt, steady
from corpus.models.library import language_gpt2
from corpus.models.llama import Llama, Rms, Rotary
from corpus.models.parts import draw
from corpus.places import within
from corpus.training import adamw, changed, decay_groups, full_setup, loss_setup


@twins("ties", place="head*|tokens*", origin=PUBLIC, thread="Automodel#2511")
def tie_lost(*, faulty: bool) -> Arguments:
    """The config says tied; the model is built on meta, materialised and drawn, which loses the tie."""

    def materialised() -> nn.Module:
        with torch.device("meta"):
            model = Llama(tied=not faulty)
        return model.to_empty(device="cpu").apply(draw_all)

    def draw_all(module: nn.Module) -> None:
        draw(module)
        if isinstance(module, Rms):
            nn.init.ones_(module.weight)
        if isinstance(module, Rotary):
            module.rates.copy_(module.computed(16))

    arguments = loss_setup(materialised, text(8), remade=False)
    model = arguments["model"]
    model.config = type("Config", (), {"tie_word_embeddings": True, "vocab_size": VOCAB})()
    if not faulty:
        model.head.weight = model.tokens.weight
    return arguments | {"optimizer": decay_groups(model)}


def untie(head: nn.Linear) -> None:
    """Give a head a copy of its matrix."""
    head.weight = nn.Parameter(head.weight.detach().clone())


@fault("ties", "seeds", place="head*|tokens*", origin=PLANTED_1)
def head_is_a_copy() -> Arguments:
    """The head is a copy of the embedding, with which it was tied."""
    return full_setup(changed(lambda model: untie(model.head)))


@fault("ties", place="lm_head*|transformer.wte*", origin=PLANTED_2)
def untied_head() -> Arguments:
    """The config says tied, and the head has a matrix of its own."""
    arguments = language_gpt2()
    head = arguments["model"].lm_head
    head.weight = nn.Parameter(torch.randn_like(head.weight) * 0.02)
    return arguments | {"optimizer": adamw(arguments["model"])}


@fault(
    "ties", "seeds", place=within("bert.embeddings.word_embeddings", "cls.predictions.decoder"), origin=DEEP
)
@planted(deep_bert)
def broken_tie(training: Training) -> None:
    """A copy for the optimizer broke the tie between embedding and head."""
    head = training.model.cls.predictions.decoder
    head.weight = nn.Parameter(head.weight.detach().clone())
    training.declare["tied"] = True


def grow(model: Gpt, *, tie: bool) -> None:
    """Add 12 rows to the vocabulary, and make a new head of that size."""
    table = model.tokens
    rows, dim = table.num_embeddings + 12, table.embedding_dim
    table.weight = nn.Parameter(torch.cat((table.weight.detach(), torch.randn(12, dim) * 0.02)))
    table.num_embeddings = rows
    model.head = nn.Linear(dim, rows, bias=False)
    model.head.weight = table.weight if tie else nn.Parameter(table.weight.detach().clone())


@twins("ties", place="head*|tokens*", origin=UNSEEN)
def tie_lost_in_larger_vocabulary(*, faulty: bool) -> Arguments:
    """The vocabulary grows by new rows; the head gets a copy of the embedding and not the embedding."""
    make = changed(partial(grow, tie=not faulty), steady)
    return loss_setup(make, text(vocab=VOCAB + 12, seed=12), declare={"tied": True})


@fault(
    "ties",
    "seeds",
    place=f"model|{within('model.layers')}",
    origin=DEEP,
    not_right="one layer may be repeated on purpose; its cache is what fails",
)
@planted(deep_llama)
def one_layer_twelve_times(training: Training) -> None:
    """The list of layers holds one layer twelve times, as [layer] * 12 gives it.

    Unlike a list in a class of one's own, it differs from what this class and configuration construct.
    """
    training.model.model.layers = nn.ModuleList([training.model.model.layers[0]] * LAYERS)


@sound(origin=PUBLIC, thread="encodecmae#3")
def shared_ff() -> Arguments:
    """One feed-forward was built for all blocks, which own the rest: a note says so."""

    def share(model: Gpt) -> None:
        for block in model.blocks[1:]:
            block.mlp = model.blocks[0].mlp

    return loss_setup(changed(share, steady), text(length=24, seed=25))
