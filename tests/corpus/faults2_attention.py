"""Faults of attention, positions, padding and targets, second list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from transformers.models.vit.modeling_vit import ViTEmbeddings

from .case import Arguments, Case, collect
from .gpt import GPT, Block, made_of, with_one
from .library import ENCODER, GROUPED, IMAGES, PADDED, library
from .other_models import TorchSeq2Seq, next_target_loss
from .places import TARGETS
from .rotary import RotaryBlock, RotaryGPT, rotate
from .rotary import made_of as rotary_of
from .setups import adamw, classified_batch, image_batch, own, padded_batch, tokens, with_loss

FAULTS2: dict[str, Case] = {}
fault = collect(FAULTS2)

# ----------------------------------------------------------------------------------------------- attention


def llama() -> Arguments:
    """Return the step of a sound Llama on padded rows."""
    return library("LlamaForCausalLM", GROUPED, padded_batch(), PADDED)


@fault("attention_scale", "siblings", place="model.layers.2*")
def hf_scale_one() -> Arguments:
    """The scores of one layer are scaled twice as much as the others'."""
    arguments = llama()
    arguments["model"].model.layers[2].self_attn.scaling *= 2
    return arguments


class CausalInEvaluation(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.training)


@fault("training_equals_evaluation", "causality", place="h.0*")
def causal_only_eval() -> Arguments:
    """The causal mask is there in evaluation only."""
    return own(made_of(CausalInEvaluation))


class SelfAlone(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.eye(q.shape[-2], dtype=torch.bool))


@fault("reach", "gradients", place="|h|h.0*")
def attends_self_only() -> Arguments:
    """Each token attends to itself alone."""
    return own(made_of(SelfAlone))


class DetachedScores(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.detach(), k.detach(), v, is_causal=True)


@fault("gradients", "derivative", place="h.1*")
def qk_dead() -> Arguments:
    """The queries and keys of one layer have no gradient."""
    return own(with_one(DetachedScores, 1))


class CentredConvolution(RotaryBlock):
    def __init__(self, dim: int, heads: int, **options: Any):
        super().__init__(dim, heads, **options)
        self.c = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.c(x.transpose(1, 2)).transpose(1, 2))


@fault("causality", place="layers.0*")
def conv_noncausal() -> Arguments:
    """A convolution before attention reads the next token."""
    return own(rotary_of(CentredConvolution))


class SoftmaxOverRows(RotaryBlock):
    def shares(self, x: Tensor) -> Tensor:
        return self.r(x).softmax(0)


@fault("rows", place="layers.0*")
def router_softmax_batch() -> Arguments:
    """The router's softmax goes over the rows of the batch."""
    return own(rotary_of(SoftmaxOverRows, mixed=True))


# ----------------------------------------------------------------------------------------------- positions


class PositionZero(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        return self.te(ids) + self.pe(torch.zeros(ids.shape[1], dtype=torch.long))


@fault("order", place="|pe*|h.0*")
def pos_zero() -> Arguments:
    """Every token is at position 0."""
    return own(lambda: PositionZero(64, 4))


class PositionOfTheRow(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        return self.te(ids) + self.pe(torch.arange(ids.shape[0]))[:, None]


@fault("order", "rows", place="|pe*|h.0*")
def pos_on_batch() -> Arguments:
    """Positions are counted along the batch."""
    return own(lambda: PositionOfTheRow(64, 4))


class ValuesRotated(RotaryBlock):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, rotate(v))


@fault("order", place="layers.0*")
def rope_on_v() -> Arguments:
    """Values are rotated like queries and keys."""
    return own(rotary_of(ValuesRotated))


class KeysRotated(RotaryBlock):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, rotate(k)


@fault("order", place="layers.0*")
def rope_k_only() -> Arguments:
    """Keys are rotated, queries are not."""
    return own(rotary_of(KeysRotated))


class NotRotated(RotaryBlock):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


@fault("order", "siblings", place="layers.2*")
def rope_off_layer() -> Arguments:
    """One layer does not rotate its queries and keys."""

    def make() -> RotaryGPT:
        model = RotaryGPT()
        model.layers[2].__class__ = NotRotated
        return model

    return own(make)


class PatchesAlone(ViTEmbeddings):
    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        patches = self.patch_embeddings(pixel_values)
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1)


@fault("order", "gradients", place="vit|vit.embeddings*")
def vit_no_pos() -> Arguments:
    """The positions of patches are never added."""
    arguments = library("ViTForImageClassification", {**IMAGES, "num_labels": 10}, image_batch())
    model = arguments["model"]
    positions = model.vit.embeddings.position_embeddings
    model.vit.embeddings.position_embeddings = nn.Parameter(torch.zeros_like(positions))
    model.vit.embeddings.__class__ = PatchesAlone
    return arguments | {"optimizer": adamw(model)}


# ------------------------------------------------------------------------------------------- padding, rows


@fault("padding", "inputs", place="attention_mask|input_ids")
def mask_all_ones() -> Arguments:
    """The attention mask has ones for padding, too."""
    arguments = llama()
    arguments["batch"]["attention_mask"] = torch.ones_like(arguments["batch"]["attention_mask"])
    return arguments


@fault("counted", place=TARGETS)
def labels_not_masked() -> Arguments:
    """Padding is among the labels."""
    arguments = llama()
    arguments["batch"]["labels"] = arguments["batch"]["input_ids"].clone()
    return arguments


class MeanOfAll(nn.Module):
    """A classifier of BERT's mean vector."""

    def __init__(self):
        super().__init__()
        self.v = tf.BertModel(tf.BertConfig(**ENCODER))
        self.h = nn.Linear(64, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.v(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.h(hidden.mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@fault("padding", place="|h|v|attention_mask")
def mean_pool_pad() -> Arguments:
    """The mean over tokens counts padding."""
    torch.manual_seed(0)
    model = MeanOfAll()
    return {"model": model, "batch": classified_batch(), "optimizer": adamw(model), "declare": PADDED}


class MeanOverRows(nn.Module):
    """A classifier of the mean vector over the wrong axis."""

    def __init__(self):
        super().__init__()
        self.v = tf.ViTModel(tf.ViTConfig(**IMAGES))
        self.h = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.h(self.v(pixels).last_hidden_state.mean(0)[: len(pixels)])


@fault("rows", place="|h|v")
def pool_over_batch() -> Arguments:
    """The mean is taken over the rows, not over the patches."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = image_batch()
    return with_loss(MeanOverRows, (batch["pixel_values"], batch["labels"]), loss)


@fault("targets", place="loss|labels|classifier")
def labels_rolled() -> Arguments:
    """Each image has the label of the one before it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"].roll(1))

    options = {**IMAGES, "num_labels": 10}
    return library("ViTForImageClassification", options, image_batch()) | {"loss": loss}


# ------------------------------------------------------------------------------------- encoder and decoder


def translation(model: type[TorchSeq2Seq], loss: Any = next_target_loss) -> Arguments:
    return with_loss(model, (tokens(), tokens(length=14, seed=4)), loss)


@fault("targets", "causality", place="loss|o|target|[01]|batch*")
def seq2seq_unshifted() -> Arguments:
    """The decoder reads the token that it predicts."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())

    return translation(TorchSeq2Seq, loss)


class NoSource(TorchSeq2Seq):
    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return super().translate(target.detach() * 0, target)


@fault("inputs", "gradients", place="source|0|t|t.encoder*")
def no_cross() -> Arguments:
    """The encoder reads zeros in the place of the source."""
    return translation(NoSource)


class NoTargetMask(TorchSeq2Seq):
    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return self.t(source, target)


@fault("causality", place="t|t.decoder|t.decoder.layers.0*")
def seq2seq_no_tgt_mask() -> Arguments:
    """The decoder has no causal mask."""
    return translation(NoTargetMask)
