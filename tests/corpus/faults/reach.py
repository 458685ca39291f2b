"""Faults that ``reach`` and ``inputs`` name: what ought to be read, and is not."""

from __future__ import annotations

import torch
import transformers as tf
from torch import Tensor, nn

from corpus.batches import ROWS, generator, tokens
from corpus.case import DEEP, PLANTED_1, PLANTED_2, Arguments, fault
from corpus.models.deep import Training, deep_bert, deep_translation, planted
from corpus.models.gpt import Attention, gpt_of
from corpus.models.images import DiT
from corpus.models.parts import becomes
from corpus.models.translators import TorchTranslator, next_target_loss
from corpus.places import BERT_MASKS, CROSS_ATTENTIONS, FIRST_CROSS
from corpus.training import adamw, full_setup, loss_setup
from normlab.nn import Attention as NormlabAttention
from normlab.nn import Context


class SelfAlone(Attention):
    def sees(self, length: int, device: torch.device) -> Tensor:
        return torch.eye(length, dtype=torch.bool, device=device)


@fault("reach", "gradients", place="|blocks|blocks.0*", origin=PLANTED_2)
def attends_self_only() -> Arguments:
    """Each token attends to itself alone."""
    return full_setup(gpt_of(SelfAlone))


@fault("reach", "causality", "inputs", place=BERT_MASKS, origin=DEEP)
@planted(deep_bert)
def encoder_built_as_a_decoder(training: Training) -> None:
    """A config with is_decoder=True makes attention causal: a masked word sees only the words before it."""
    config = training.model.config
    config.is_decoder, config.use_cache = True, False
    training.model = tf.BertForMaskedLM(config)
    training.declare["causal"] = False


class CausalOverSource(NormlabAttention):
    """Cross-attention that got the decoder's causal mask, too."""

    def _mask(self, context: Context) -> Tensor | None:
        mask = super()._mask(context)
        if mask is None or context.padding_mask is None:
            return mask
        queries, keys = context.padding_mask.shape[1], mask.shape[-1]
        return mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()


@fault(
    "reach",
    "padding",
    "inputs",
    place=FIRST_CROSS,
    origin=DEEP,
    not_right="the last token of the target sees the whole source",
)
@planted(deep_translation)
def causal_mask_over_the_source(training: Training) -> None:
    """The causal mask went to cross-attention, too: target token t reads the source up to token t alone."""
    for path in CROSS_ATTENTIONS:
        becomes(training.model.get_submodule(path).f, CausalOverSource)


class IgnoresTime(DiT):
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, t * 0, y)


@fault("inputs", "gradients", place="t|time*", origin=PLANTED_1)
def ignores_t() -> Arguments:
    """A diffusion model does not read its time."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(**batch) - 1).pow(2).mean()

    numbers = generator(0)
    images = torch.randn(ROWS, 4, 8, 8, generator=numbers)
    times = torch.rand(ROWS, generator=numbers) * 1000
    batch = {"x": images, "t": times, "y": torch.tensor([1, 3, 5, 7])}
    return loss_setup(IgnoresTime, batch, loss, adamw, remade=False)


class NoSource(TorchTranslator):
    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return super().translate(target.detach() * 0, target)


@fault("inputs", "gradients", place="source|0|transformer|transformer.encoder*", origin=PLANTED_2)
def no_cross() -> Arguments:
    """The encoder reads zeros in the place of the source."""
    return loss_setup(NoSource, (tokens(), tokens(length=14, seed=4)), next_target_loss, remade=False)
