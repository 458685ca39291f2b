"""Faults planted in normlab's encoder-decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from normlab.nn import PAD, Context, Seq2Seq, Sublayer
from normlab.nn import Attention as OwnAttention
from normlab.nn.kernels.ops import Dropout
from normlab.nn.position import Sinusoidal

from .case import Case
from .places import SCHEDULER, within
from .planted_models import LAYERS, Training, becomes, planting, target_loss, translation

PLANTED: dict[str, Case] = {}
fault = planting(translation, PLANTED)
CROSS = [f"decoder.sublayers.{i}" for i in range(1, 3 * LAYERS // 2, 3)]
"""The cross-attentions."""
SELF = [f"decoder.sublayers.{i}" for i in range(0, 3 * LAYERS // 2, 3)]
"""The self-attentions of the decoder."""
FIRST_CROSS = f"source|decoder|{within(CROSS[0])}"
LOSS = "|loss|embedding|target_in"
KEPT = 0.9
"""Share of the activations that was to be kept."""

# ---------------------------------------------------------------------------------------- masks, positions


@fault("causality", place=f"decoder|{within(SELF[0])}")
def target_mask_forgotten(training: Training) -> None:
    """The decoder got no causal mask, the forgotten tgt_mask of nn.Transformer: it reads what it predicts."""
    for path in SELF:
        training.model.get_submodule(path).f.causal = False


class CausalOverSource(OwnAttention):
    """Cross-attention that got the decoder's causal mask, too."""

    def _mask(self, context: Context) -> Tensor | None:
        mask = super()._mask(context)
        if mask is None or context.padding_mask is None:
            return mask
        queries, keys = context.padding_mask.shape[1], mask.shape[-1]
        return mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()


@fault("reach", "padding", "inputs", place=FIRST_CROSS)
def causal_mask_over_the_source(training: Training) -> None:
    """The causal mask went to cross-attention, too: target token t reads the source up to token t alone."""
    for path in CROSS:
        becomes(training.model.get_submodule(path).f, CausalOverSource)


def encode_padding(model: Seq2Seq, source: Tensor) -> tuple[Tensor, Tensor]:
    """Encode with a mask that is True where there is padding."""
    mask = source == PAD
    return model.encoder(model.embed(source), Context(padding_mask=mask)), mask


@fault("padding", place=f"|source|encoder|{within('encoder.sublayers.0')}")
def inverted_mask(training: Training) -> None:
    """The mask of the source is inverted, so that tokens attend to padding."""
    training.model.encode = MethodType(encode_padding, training.model)


def decode_without_memory_mask(
    model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor
) -> Tensor:
    """Decode without the mask of the memory."""
    context = Context(padding_mask=target_in != PAD, memory=memory)
    return model.decoder(model.embed(target_in), context)


@fault("padding", place=FIRST_CROSS)
def memory_mask_forgotten(training: Training) -> None:
    """Cross-attention gets no mask of the source's padding, the forgotten memory_key_padding_mask."""
    training.model.decode = MethodType(decode_without_memory_mask, training.model)


def decode_itself(model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
    """Decode with the target's own embeddings in the place of the memory."""
    mask, x = target_in != PAD, model.embed(target_in)
    return model.decoder(x, Context(padding_mask=mask, memory=x, memory_mask=mask))


@fault("causality", "inputs", "gradients", place=f"{FIRST_CROSS}|{within('encoder')}")
def cross_attention_to_the_target(training: Training) -> None:
    """Cross-attention reads the embedded target instead of the encoder's output."""
    training.model.decode = MethodType(decode_itself, training.model)


class PositionOfTheRow(Sinusoidal):
    """Sinusoids for inputs `[T, B, D]`, as in PyTorch's tutorial, which models with `[B, T, D]` copy."""

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        return x + self.table[: x.shape[0], None]


@fault("order", "rows", place=f"|embedding|encoder|{within('encoder.sublayers.0', 'position_encoding')}")
def positions_over_the_batch(training: Training) -> None:
    """The position encoding counts along the batch, so that all tokens of a row have the same position."""
    becomes(training.model.position_encoding, PositionOfTheRow)


@fault("buffers", "order", place=within("position_encoding"))
def frequencies_by_integer_division(training: Training) -> None:
    """The exponents of the sinusoids are divided as integers: all are 0, and all frequencies are 1."""
    table = training.model.position_encoding.table
    length, width = table.shape
    exponents = torch.arange(0, width, 2) // width
    angles = torch.arange(length)[:, None] / 10_000**exponents
    table.copy_(torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
    training.make = lambda: translation().model


# -------------------------------------------------------------------------------- stream, gradients, starts


class WithoutStream(Sublayer):
    """A sublayer that returns its branch alone."""

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.f(self.place.read(stream), *args, **kwargs)


@fault("residual", place=within("decoder.sublayers.10"))
def sublayer_without_residual(training: Training) -> None:
    """A cross-attention of the decoder has no residual."""
    becomes(training.model.decoder.sublayers[10], WithoutStream)


@fault("gradients", "derivative", place=f"decoder|{within('encoder')}")
def detached_memory(training: Training) -> None:
    """The decoder reads the encoder's output without its graph, so that the encoder does not learn."""
    training.model.encoder.register_forward_hook(lambda module, args, output: output.detach())


@fault("frozen", "siblings", place=within("encoder.sublayers.[01]"))
def frozen_first_layer(training: Training) -> None:
    """The encoder's first layer is frozen."""
    for sublayer in training.model.encoder.sublayers[:2]:
        sublayer.requires_grad_(False)


@fault("start", "gradients", place=within("decoder.sublayers.8"))
def zeros_where_a_hook_was_skipped(training: Training) -> None:
    """An init hook was skipped: the inner matrix of a feed-forward of the decoder is zero and stays so."""
    nn.init.zeros_(training.model.decoder.sublayers[8].f.inner.weight)


@fault("start", "gradients", place=within("encoder.sublayers.5"))
def norm_gain_of_zeros(training: Training) -> None:
    """The gain of one norm of the encoder was never filled: it is zero."""
    nn.init.zeros_(training.model.encoder.sublayers[5].place.norm.weight)


@fault("initial_loss", "start", place=f"{LOSS}|{within('embedding')}")
@torch.no_grad()
def embedding_deviation_of_one(training: Training) -> None:
    """The shared embedding has a deviation of 1.0, which the model multiplies by the root of the width."""
    training.model.embedding.weight.normal_(0.0, 1.0)


@fault("overfit", "step", place="|loss|optimizer|step|*dropout*")
def dropout_is_the_keep_probability(training: Training) -> None:
    """Dropout got the share to be kept, the keep_prob of TensorFlow: 90% of every branch is dropped."""
    for module in training.model.modules():
        if isinstance(module, Dropout) and module.p:
            module.p = KEPT


# ------------------------------------------------------------------------------------------------- losses


def padded_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token, padding among them."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@fault("counted", place=LOSS)
def padding_in_the_loss(training: Training) -> None:
    """The loss is a mean over padding, too, which the model learns to predict."""
    training.loss = padded_loss


def loss_of_a_view(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of logits that were reshaped to `[B, V, T]`, not transposed."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    rows, length, vocab = logits.shape
    return F.cross_entropy(logits.reshape(rows, vocab, length), labels, ignore_index=PAD)


@fault("targets", "explained", "causality", place=LOSS)
def vocabulary_axis_by_reshape(training: Training) -> None:
    """The vocabulary is moved to axis 1 by a reshape, not a transpose, so that the loss mixes the tokens."""
    training.loss = loss_of_a_view


def smoothed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of the next target token, with confidence and smoothing exchanged."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=0.9)


@fault("targets", "explained", place=LOSS)
def smoothing_is_the_confidence(training: Training) -> None:
    """The label smoothing is 0.9, which was to be the confidence: the target has 10% of the weight."""
    training.loss = smoothed_loss


def loss_of_the_previous_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the target token before each position."""
    logits, labels = model(**batch)[:, 1:], batch["target_in"][:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@fault("targets", place=LOSS)
def shifted_the_wrong_way(training: Training) -> None:
    """Logits and labels are shifted the wrong way, so that the model learns to repeat the previous token."""
    training.loss = loss_of_the_previous_token


def wrapped_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the value of the loss as a new tensor, which silences the error of ``backward``."""
    return torch.tensor(target_loss(model, batch).item(), requires_grad=True)


@fault("gradients", "derivative", "explained", place="")
def loss_in_a_new_tensor(training: Training) -> None:
    """The loss is wrapped in a new tensor that requires a gradient, so that no parameter gets any."""
    training.loss = wrapped_loss


# ----------------------------------------------------------------------------------------------- optimizer


@fault("optimizer_coverage", place="")
def optimizer_of_a_former_model(training: Training) -> None:
    """The optimizer was built before the model was built anew, so that it holds no parameter of the model."""

    def of_former(parameters: list[nn.Parameter]) -> AdamW:
        former = [nn.Parameter(p.detach().clone()) for p in parameters]
        return AdamW(former, lr=training.lr, betas=(0.9, 0.98), weight_decay=1e-4)

    training.optimizer = of_former


@fault("schedule", place=SCHEDULER)
def rate_multiplied_by_itself(training: Training) -> None:
    """The lambda of LambdaLR returns a rate, which torch multiplies by the optimizer's: 5e-4 is squared."""
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.9, 0.98), weight_decay=1e-4)
    training.rate = lambda step: training.lr * training.warmup(step)
