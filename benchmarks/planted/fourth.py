"""Ten further mistakes, chosen by someone who has not seen the rules and knows only the architectures.

The words are narrow: those that would also describe a similar mistake at the same place are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from normlab.nn import PAD, Context
from normlab.nn import Attention as OwnAttention

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .models import HEADS, LAYERS, MASK_ID, Attention, Case, generator, padded_words

FOURTH = Faults()
CROSS = tuple(f"decoder.sublayers.{i}" for i in range(1, 3 * LAYERS // 2, 3))
"""The cross-attentions of the encoder-decoder."""

# ------------------------------------------------------------------------------------------------ GPT-2


class QueriesAsKeys(Attention):
    """Attention in which a slip of the pen takes the queries for the keys too."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, _, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = (q @ q.transpose(-2, -1)) * self.scale
        y = self.weights(scores.masked_fill(~self.mask[:length, :length], float("-inf"))) @ v
        return self.dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


@FOURTH.add(
    "gpt2",
    *within("h.*.attn"),
    words=(
        *("no gradient", "zero gradient", "without gradient", "without a gradient", "gradient is 0"),
        *("gradient of 0", "gradient of exactly 0", "gradient of zero", "gradient is zero"),
        *("unused", "never used", "not used", "never learn", "symmetric", "third of"),
        *("key matrix", "key map", "key projection", "key weights", "key rows", "rows of the key"),
    ),
)
def queries_taken_for_keys(case: Case) -> None:
    """The scores are products of queries with queries: the rows of c_attn for the keys are never used."""
    for block in case.model.h:
        becomes(block.attn, QueriesAsKeys)


def likelihood_of_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return nll_loss of the logits, which it takes for log-probabilities."""
    logits, _ = model(batch["idx"])
    return F.nll_loss(logits.flatten(0, 1), batch["targets"].flatten())


@FOURTH.add(
    "gpt2",
    "",
    LOSS,
    *within("lm_head"),
    words=(
        *("log_softmax", "log-softmax", "log softmax", "logsoftmax", "nll", "log-prob", "log prob"),
        *("no softmax", "without softmax", "without a softmax", "softmax is missing", "missing softmax"),
        *("unnormali", "not normali", "never normali", "without normali", "logsumexp"),
        *("unbounded", "not bounded", "no lower bound", "below 0", "below zero", "negative loss"),
    ),
)
def nll_loss_of_logits(case: Case) -> None:
    """nll_loss gets logits without log_softmax, so that the loss falls without end as logits grow."""
    case.loss = likelihood_of_logits


# ------------------------------------------------------------------------------------------------- BERT


@FOURTH.add(
    "bert",
    "",
    BATCH,
    *within("bert.embeddings.word_embeddings"),
    words=(
        *("70%", "70 %", "85%", "85 %", "86%", "86.", "87%", "87 %", "15%", "15 %"),
        *("too many", "too much of", "MASK]", "id 3", "token 3"),
        *("most of the", "most words", "most tokens", "most input", "nearly all", "almost all", "majority"),
        *("share of", "fraction of", "proportion"),
    ),
)
def words_masked_but_for_15_percent(case: Case) -> None:
    """The comparison is the wrong way round: 85% of the words are masked, and 15% are left to read."""
    ids = padded_words()
    predicted = (torch.rand(ids.shape, generator=generator()) >= 0.15) & (ids != PAD)
    case.batch["input_ids"] = ids.masked_fill(predicted, MASK_ID)
    case.batch["labels"] = ids.masked_fill(~predicted, -100)


@FOURTH.add(
    "bert",
    "bert.encoder",
    *within("bert.encoder.layer"),
    words=(
        *("identical", "are equal", "copy", "copies", "copied", "clone", "deepcopy", "duplicate", "replica"),
        *("same weights", "same values", "same matri", "same parameters", "same numbers", "same start"),
        *("same initial", "same random", "same draw", "the same as", "same seed"),
    ),
)
def layers_are_deep_copies(case: Case) -> None:
    """The layers are deep copies of one, as in nn.TransformerEncoder, and start with the same weights."""
    first, *others = case.model.bert.encoder.layer
    for layer in others:
        layer.load_state_dict(first.state_dict())


@FOURTH.add("bert", OPTIMISER, words=("beta", "β", "momentum", "first moment", "moving average"))
def betas_exchanged(case: Case) -> None:
    """Adam's betas are exchanged: gradients are averaged over 1000 steps, and their squares over 10."""
    case.optimiser = partial(AdamW, lr=case.lr, betas=(0.999, 0.9), weight_decay=0.01)


# ------------------------------------------------------------------------------------------------ Llama


@FOURTH.add(
    "llama",
    *within("model.embed_tokens"),
    words=(
        *("padding_idx", "padding idx", "padding index", "padding row", "499", "one row", "a row", "the row"),
        *("single row", "1 row", "zero row", "row of", "500 rows", "one token", "one word", "single token"),
        *("single word", "last token", "last word", "last row"),
    ),
)
@torch.no_grad()
def padding_index_of_minus_one(case: Case) -> None:
    """A padding_idx of -1, for "none", is the last word to torch: its row is zero and gets no gradient."""
    embedding = case.model.model.embed_tokens
    embedding.padding_idx = embedding.num_embeddings - 1
    embedding.weight[embedding.padding_idx].zero_()


class InterleavedAngles(LlamaRotaryEmbedding):
    """Angles of neighbours (2i, 2i + 1), for a model that rotates pairs (i, i + w/2) of the two halves."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (y.chunk(2, -1)[0] for y in super().forward(x, position_ids))
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


@FOURTH.add(
    "llama",
    "model.layers.0",
    *within("model.rotary_emb", "model.layers.*.self_attn"),
    words=(
        *("interleav", "pair", "halves", "half", "rotate_half", "not a rotation", "no rotation"),
        *("orthogonal", "preserve", "absolute", "stretch", "length of a", "lengths of", "norm of a quer"),
    ),
)
def angles_interleaved_for_halves(case: Case) -> None:
    """The angles are laid out for interleaved pairs, and rotate_half pairs the halves of a head."""
    becomes(case.model.model.rotary_emb, InterleavedAngles)


# ------------------------------------------------------------------------- encoder-decoder of normlab


class CausalOverSource(OwnAttention):
    """Cross-attention that got the decoder's causal mask too."""

    def _mask(self, context: Context) -> Tensor | None:
        mask = super()._mask(context)
        if mask is None or context.padding_mask is None:
            return mask
        queries, keys = context.padding_mask.shape[1], mask.shape[-1]
        return mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()


@FOURTH.add(
    "translation",
    *within(*CROSS),
    words=(
        *("causal", "triang", "tril", "later source", "future source", "later memory", "end of the source"),
        *("rest of the source", "whole source", "all of the source", "part of the source"),
        *("rest of the memory", "whole memory", "all of the memory", "part of the memory"),
    ),
)
def causal_mask_over_the_source(case: Case) -> None:
    """The causal mask went to cross-attention too: target token t reads the source up to token t alone."""
    for path in CROSS:
        becomes(case.model.get_submodule(path).f, CausalOverSource)


def smoothed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of the next target token, with confidence and smoothing exchanged."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=0.9)


@FOURTH.add(
    "translation",
    "",
    LOSS,
    words=("smooth", "soft label", "soft target", "confidence", "confident", "perfect", "0.9"),
)
def smoothing_is_the_confidence(case: Case) -> None:
    """The label smoothing is 0.9, which was to be the confidence: the target has 10% of the weight."""
    case.loss = smoothed_loss


@FOURTH.add(
    "translation",
    OPTIMISER,
    words=(
        *("too small", "small step", "small rate", "small learning", "small update", "too low", "low rate"),
        *("low learning", "little", "hardly", "barely", "tiny", "slow", "negligible", "squared", "LambdaLR"),
        *("2.5e-07", "2.5e-7"),
    ),
)
def rate_multiplied_by_itself(case: Case) -> None:
    """The lambda of LambdaLR returns a rate, which torch multiplies by the optimiser's: 5e-4 is squared."""
    case.lr **= 2
    case.optimiser = partial(AdamW, lr=case.lr, betas=(0.9, 0.98), weight_decay=1e-4)
