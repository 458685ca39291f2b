"""Faults that ``norms`` names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from corpus.batches import text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PUBLIC, Arguments, fault, twins
from corpus.models.deep import Training, deep_gpt2, deep_llama, planted
from corpus.models.llama import Llama, Rms, llama_of
from corpus.models.parts import becomes
from corpus.places import LLAMA_NORMS, within
from corpus.training import changed, full_setup, loss_setup


class RmsWithoutRoot(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@fault("norms", "siblings", place="blocks.2*", origin=PLANTED_1)
def rms_no_root() -> Arguments:
    """One norm divides by the mean square, not by its root."""
    return full_setup(changed(lambda model: becomes(model.blocks[2].norm_1, RmsWithoutRoot), Llama))


class WithoutRoot(LlamaRMSNorm):
    """A norm that divides by the mean square."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states / (square + self.variance_epsilon)


@fault("norms", "siblings", place=within("model.layers.9"), origin=DEEP)
@planted(deep_llama)
def mean_square_without_its_root(training: Training) -> None:
    """The first norm of layer 9, counted from 0, divides by the mean square, not by its root."""
    becomes(training.model.model.layers[9].input_layernorm, WithoutRoot)


@fault("norms", place=f"{within('model.layers.0')}|{LLAMA_NORMS}", origin=DEEP)
@planted(deep_llama)
def epsilon_of_the_wrong_sign(training: Training) -> None:
    """The epsilon of every RMSNorm is 1e5 where 1e-5 was meant, so that all branches are silent."""
    for module in training.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e5


def without_final_norm(model: nn.Module) -> None:
    model.norm = nn.Identity()


@fault("norms", place="|norm|head*|blocks.3", origin=PLANTED_2)
def no_final_norm() -> Arguments:
    """The head reads the stream without a norm."""
    return full_setup(changed(without_final_norm))


@fault("norms", place="|norm|head|blocks.11", origin=DEEP)
@planted(deep_gpt2)
def deep_no_final_norm(training: Training) -> None:
    """The stream of twelve layers ends without its final norm."""
    without_final_norm(training.model)


class OffsetNorm(Rms):
    """A norm whose weight is the gain's offset from one, as in a trained checkpoint of Gemma's."""

    from_one = True

    def __init__(self, dim: int):
        super().__init__(dim)
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.from_one else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gain


class ReadAsGain(OffsetNorm):
    from_one = False


@twins("norms", "start", place="blocks.0*|blocks.*norm*|norm*", origin=PUBLIC, thread="shainet#176")
def offset_norm(*, faulty: bool) -> Arguments:
    """Gains are kept as an offset from one, and the forward pass reads them as plain gains."""
    kind = ReadAsGain if faulty else OffsetNorm
    make = changed(lambda model: setattr(model, "norm", kind(64)), llama_of(norm=kind))
    return loss_setup(make, text(8), remade=False)
