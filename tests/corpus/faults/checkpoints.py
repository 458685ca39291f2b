"""Faults that ``gradients`` names where blocks are computed again: re-entrant checkpoints give none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from corpus.batches import text
from corpus.case import DEEP, PLANTED_1, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_llama, planted
from corpus.models.gpt import Gpt
from corpus.models.llama import Llama, Rotations
from corpus.models.parts import LoRA, becomes
from corpus.places import within
from corpus.training import adamw_of_trained, changed, full_setup, loss_setup


class Reentrant(Gpt):
    """Blocks that are computed again in the backward pass by the older, re-entrant checkpoint."""

    reentrant = True

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return x


class ReentrantWithoutGraph(Reentrant):
    """Embeddings without a graph in training, before re-entrant checkpoints."""

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad() if self.training else torch.enable_grad():
            return super().embed(ids)


@fault("gradients", "derivative", place="blocks|blocks.*|tokens*|positions*", origin=PLANTED_1)
def reentrant() -> Arguments:
    """Re-entrant checkpoints give no gradient, since their input has none."""
    return full_setup(ReentrantWithoutGraph, step=None)


class Checkpointed(Reentrant):
    reentrant = False


@twins("gradients", place="blocks*", origin=UNSEEN)
def reentrant_checkpoint_after_frozen_embedding(*, faulty: bool) -> Arguments:
    """Blocks in reentrant checkpoints get an input without a gradient, and so none themselves."""

    def freeze(model: Gpt) -> None:
        model.tokens.requires_grad_(False)
        model.positions.requires_grad_(False)

    kind = Reentrant if faulty else Checkpointed
    make = changed(freeze, partial(kind, layers=3, dropout=0.0, tied=False))
    declare = {"frozen": ["tokens.*", "positions.*"], "tied": False}
    return loss_setup(make, text(seed=10), declare=declare)


class CheckpointedLayer(LlamaDecoderLayer):
    """A layer under the older, reentrant checkpointing, which sees its positional arguments alone."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return checkpoint(partial(super().forward, **kwargs), hidden_states, use_reentrant=True)


@fault("gradients", "derivative", place=f"|model|model.norm|{within('model.layers')}", origin=DEEP)
@planted(deep_llama)
def checkpoints_behind_a_frozen_embedding(training: Training) -> None:
    """The embedding is frozen, and reentrant checkpoints give no gradient if their input requires none."""
    training.model.model.embed_tokens.requires_grad_(False)
    for layer in training.model.model.layers:
        becomes(layer, CheckpointedLayer)


class Adapted(Llama):
    """A frozen decoder with adapters and a trained head, whose blocks are checkpointed in training."""

    inputs_with_gradient = True

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.attn.q, block.attn.v = LoRA(block.attn.q), LoRA(block.attn.v)
        self.head.requires_grad_(True)

    def run(self, x: Tensor, rotations: Rotations, seen: Tensor | None) -> Tensor:
        if self.inputs_with_gradient:
            x.requires_grad_(True)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, rotations, use_reentrant=True)
            else:
                x = block(x, rotations)
        return x


class AdaptedWithoutGradient(Adapted):
    inputs_with_gradient = False


@twins("gradients", "derivative", place="blocks.0*", origin=PUBLIC, thread="open-unlearning#178")
def lora_ckpt(*, faulty: bool) -> Arguments:
    """Re-entrant checkpoints give no gradient where their input has none: adapters learn nothing."""
    make = AdaptedWithoutGradient if faulty else Adapted
    return loss_setup(make, text(8), optimizer=adamw_of_trained, remade=False)
