"""Faults that ``buffers`` names: tables that are not what the class computes."""

from __future__ import annotations

import torch
from torch import nn

from corpus.batches import text
from corpus.case import DEEP, LATER, PLANTED_2, Arguments, fault, twins
from corpus.models.deep import Training, deep_llama, deep_translation, planted
from corpus.models.library import padded_llama
from corpus.models.llama import Llama, Rms, Rotary
from corpus.models.parts import draw
from corpus.places import LLAMA_POSITIONS, within
from corpus.training import loss_setup


@fault("buffers", place="model.rotary_emb*", origin=PLANTED_2)
def hf_inv_freq() -> Arguments:
    """The frequencies of the rotary embedding are half of what the class computes."""
    arguments = padded_llama()
    arguments["model"].model.rotary_emb.inv_freq.mul_(0.5)
    return arguments


@fault("buffers", "order", place=LLAMA_POSITIONS, origin=DEEP)
@planted(deep_llama)
def rotary_buffer_of_zeros(training: Training) -> None:
    """After to_empty nobody filled the frequencies of the rotary embedding: all are 0."""
    training.model.model.rotary_emb.inv_freq.zero_()


@fault("buffers", "order", place=within("position_encoding"), origin=DEEP)
@planted(deep_translation)
def frequencies_by_integer_division(training: Training) -> None:
    """The exponents of the sinusoids are divided as integers: all are 0, and all frequencies are 1."""
    table = training.model.position_encoding.table
    length, width = table.shape
    exponents = torch.arange(0, width, 2) // width
    angles = torch.arange(length)[:, None] / 10_000**exponents
    table.copy_(torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
    training.make = lambda: deep_translation().model


@twins("buffers", "order", "meta", place="rotary*|blocks.0*|", origin=LATER)
def rotary_table_lost_on_meta(*, faulty: bool) -> Arguments:
    """The start after the meta device leaves out the rotary table, which stays empty."""

    def start(module: nn.Module) -> None:
        draw(module)
        if isinstance(module, Rms):
            nn.init.ones_(module.weight)
        if isinstance(module, Rotary) and not faulty:
            module.rates.copy_(module.computed(16))

    def from_meta() -> nn.Module:
        with torch.device("meta"):
            model = Llama()
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()  # new memory holds zeros as a rule; here always, so that the case repeats
        return model.apply(start)

    return loss_setup(from_meta, text(seed=21), seed=21) | {"make": Llama}
