"""Faults that ``rows`` names: a row of the batch that reads others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from corpus.batches import image_batch
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PLANTED_3, Arguments, fault
from corpus.models.deep import Training, deep_gpt2, planted
from corpus.models.experts import StackedExperts
from corpus.models.gpt import Attention
from corpus.models.library import IMAGES
from corpus.models.llama import Llama, Rms, llama_of
from corpus.models.parts import becomes
from corpus.places import FIRST_ATTENTION
from corpus.training import changed, full_setup, loss_setup


class NormOverRows(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True) + 1e-5) * self.weight


@fault("rows", "norms", place="blocks.1*", origin=PLANTED_1)
def norm_over_batch() -> Arguments:
    """A norm takes its mean and deviation over the rows of the batch."""
    return full_setup(changed(lambda model: setattr(model.blocks[1], "norm_2", NormOverRows(64))))


class RmsOverRows(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((0, -1), keepdim=True) + self.eps) * self.weight


@fault("rows", "norms", place="blocks.1*", origin=PLANTED_3)
def bn_tokens() -> Arguments:
    """One norm takes its mean square over the rows of the batch, too."""
    return full_setup(changed(lambda model: becomes(model.blocks[1].norm_2, RmsOverRows), Llama))


class SharesOverRows(StackedExperts):
    def shares(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(0)


@fault("rows", place="blocks.0*", origin=PLANTED_2)
def router_softmax_batch() -> Arguments:
    """The router's softmax goes over the rows of the batch."""
    return full_setup(llama_of(mlp=SharesOverRows))


class MeanOverRows(nn.Module):
    """A classifier of the mean vector over the wrong axis."""

    def __init__(self):
        super().__init__()
        self.vit = tf.ViTModel(tf.ViTConfig(**IMAGES))
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.vit(pixels).last_hidden_state.mean(0)[: len(pixels)])


@fault("rows", place="|head|vit", origin=PLANTED_2)
def pool_over_batch() -> Arguments:
    """The mean is taken over the rows, not over the patches."""
    batch = image_batch()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return loss_setup(MeanOverRows, (batch["pixel_values"], batch["labels"]), loss, remade=False)


class TimeFirst(Attention):
    """Attention for inputs `[T, B, D]`, as nn.MultiheadAttention is without batch_first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@fault("rows", "reach", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def attention_over_the_batch(training: Training) -> None:
    """Attention expects time on the first axis, so that it goes over the rows of a batch, not over tokens."""
    for block in training.model.blocks:
        becomes(block.attn, TimeFirst)
