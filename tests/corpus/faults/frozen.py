"""Faults that ``frozen`` names: parts that were not meant to be frozen."""

from __future__ import annotations

from functools import partial

from torch import nn

from corpus.batches import text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, deep_translation, planted
from corpus.models.gpt import Block, Gpt, untied
from corpus.places import within
from corpus.training import adamw_of_trained, changed, decay_groups, full_setup, loss_setup


@fault("frozen", "siblings", place="blocks.2*", origin=PLANTED_1)
def frozen_mid() -> Arguments:
    """One layer between trained ones is frozen."""
    make = changed(lambda model: model.blocks[2].requires_grad_(False))
    return full_setup(make, optimizer=adamw_of_trained)


@fault("frozen", "siblings", place=within("bert.encoder.layer.4"), origin=DEEP)
@planted(deep_bert)
def frozen_layer(training: Training) -> None:
    """Layer 4, counted from 0, is frozen."""
    training.model.bert.encoder.layer[4].requires_grad_(False)


@fault(
    "frozen",
    "siblings",
    place=within("encoder.sublayers.[01]"),
    origin=DEEP,
    not_right="a first layer may be frozen on purpose",
)
@planted(deep_translation)
def frozen_first_layer(training: Training) -> None:
    """The encoder's first layer is frozen."""
    for sublayer in training.model.encoder.sublayers[:2]:
        sublayer.requires_grad_(False)


@fault("frozen", place="tokens*", origin=PLANTED_2)
def frozen_emb() -> Arguments:
    """The embedding is frozen while all else is trained."""
    make = changed(lambda model: model.tokens.requires_grad_(False), untied)
    return full_setup(make, optimizer=adamw_of_trained)


@fault("frozen", "gradients", place=within("tokens", "head"), origin=DEEP)
@planted(deep_gpt2)
def embedding_frozen_by_from_pretrained(training: Training) -> None:
    """nn.Embedding.from_pretrained freezes without freeze=False: the vectors and the tied head stay."""
    training.model.tokens = nn.Embedding.from_pretrained(training.model.tokens.weight.detach().clone())
    training.model.head.weight = training.model.tokens.weight


class NumberedBlock(Block):
    """A block whose feed-forward is a Sequential, so that its layers are numbered."""

    def __init__(self, dim: int, dropout: float):
        super().__init__(dim, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


@twins("frozen", "siblings", place="blocks.[123]|blocks.[123].mlp*", origin=LATER)
def frozen_by_a_part_of_the_name(*, faulty: bool) -> Arguments:
    """The first block is frozen by ".0.", which the first layer of each feed-forward has in its name."""
    make = partial(Gpt, dropout=0.0, tied=False, block=NumberedBlock)
    arguments = loss_setup(make, text(length=24, seed=15))
    for path, parameter in arguments["model"].named_parameters():
        first = ".0." in path if faulty else path.startswith("blocks.0.")
        if first or path.startswith(("tokens.", "positions.")):
            parameter.requires_grad_(False)
    frozen = ["tokens*", "positions*", "blocks.0.*"]
    optimizer = decay_groups(arguments["model"])  # of what is trained
    return arguments | {"optimizer": optimizer, "declare": {"frozen": frozen}}
