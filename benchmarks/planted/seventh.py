"""Ten further mistakes, the most frequent in forums and reviews that no other list has, chosen blindly."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from normlab.nn import PAD
from normlab.nn.kernels.ops import Dropout

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .fifth import LAYER, NO_GRADIENT
from .known import LEAK
from .models import DIM, GPT, HEADS, LAYERS, Attention, Case, padded_words

SEVENTH = Faults()
KEPT = 0.9
"""Share of the activations that was to be kept."""
SELF = tuple(f"decoder.sublayers.{i}" for i in range(0, 3 * LAYERS // 2, 3))
"""The self-attentions of the decoder of the encoder-decoder."""
NOT_TRAINED = (
    *("frozen", "freez", "requires_grad", "not trained", "never trained", "n't trained", "not train"),
    *("never train", "untrained", "untrainable", "non-trainable", "not learn", "never learn", "n't learn"),
    *("not updat", "never updat", "n't updat", "no updat", "without updat", "without an updat", "not mov"),
    *("never mov", "unchanged", "not step", "never step", "stays at", "stay at", "stays as", "stay as"),
    *("stays what", "stay what", "remains at", "remain at", "remains as", "remain as", "keeps its initial"),
    *("keep their initial", "not changed", "never changed", "not change at", "never change"),
)
"""Words for parameters that stay what they are."""

# ------------------------------------------------------------------------------------------------ GPT-2


@SEVENTH.add(
    "gpt2",
    "",
    OPTIMISER,
    *within("wte", "lm_head"),
    words=(
        *(*NOT_TRAINED, *NO_GRADIENT, "from_pretrained", "not require", "require no", "requires no"),
        *("not trainable", "n't trainable", "n't require", "requires grad", "require grad", "is fixed"),
        *("are fixed", "held fixed", "kept fixed", "held constant", "kept constant", "stays random"),
        *("stay random", "remains random", "remain random"),
    ),
)
def embedding_frozen_by_from_pretrained(case: Case) -> None:
    """nn.Embedding.from_pretrained freezes unless told freeze=False: the vectors and the tied head stay."""
    case.model.wte = nn.Embedding.from_pretrained(case.model.wte.weight.detach().clone())
    case.model.lm_head.weight = case.model.wte.weight


class MakesItsMap(Attention):
    """Attention that makes its output map in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * self.scale
        y = self.weights(scores.masked_fill(~self.mask[:length, :length], float("-inf"))) @ v
        return self.dropout(nn.Linear(DIM, DIM).to(y)(y.transpose(1, 2).flatten(2)))


@SEVENTH.add(
    "gpt2",
    "",
    "h",
    OPTIMISER,
    *LAYER,
    *within("h.*.attn"),
    words=(
        *("random", "nondetermin", "non-determin", "determinis", "not reproduc", "irreproduc", "two passes"),
        *("two runs", "two calls", "two evaluations", "two forward", "run twice", "runs twice"),
        *("called twice", "evaluated twice", "passes differ", "differs between", "from pass to"),
        *("differ between", "differs from pass", "from call to", "from run to", "second pass", "second time"),
        *("each pass", "every pass", "each call", "every call", "each forward", "every forward"),
        *("in forward", "in the forward", "in its forward", "inside forward", "inside the forward"),
        *("inside its forward", "during forward", "during the forward", "within forward"),
        *("within the forward", "on the fly", "same input gives", "same batch gives", "different output"),
        *("different result", "different logit", "anew", "re-created", "recreated", "re-drawn", "redrawn"),
        *("redraws", "creates", "created", "new matri", "a new ", "new weight", "new Linear", "new layer"),
        *("new map", "new param", "fresh", "not register", "unregister", "never register", "n't register"),
        *("not a parameter", "no parameter", "no nn.Parameter", "not in parameters"),
        *("not in model.parameters", "not among", "not a submodule", "not part of the model"),
        *("not in the model", "outside the model", "in the optim", "to the optim", "no output matrix"),
        *("no output map", "no output proj", "lacks its output", "lacks an output", "without an output"),
        *("output projection is missing", "no c_proj", "at each call", "anew at", "not a module"),
    ),
)
def linear_made_in_forward(case: Case) -> None:
    """Attention makes its output map in forward: new random weights at each call, which no one trains."""
    for block in case.model.h:
        becomes(block.attn, MakesItsMap)
        del block.attn.c_proj


class RectifiedLogits(GPT):
    """A model with an activation behind its head, as behind any other linear layer."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = F.relu(super().forward(idx)[0])
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@SEVENTH.add(
    "gpt2",
    "",
    LOSS,
    "ln_f",
    *within("lm_head"),
    words=(
        *("ReLU", "rectif", "nonlinear", "non-linear", "nonneg", "non-neg", "clamp", "clipped at 0"),
        *("clipped at zero", "clipped below", "cut at 0", "cut at zero", "below 0", "below zero", "under 0"),
        *("under zero", "less than 0", "less than zero", "smaller than 0", "at least 0", "at least zero"),
        *(">= 0", "≥ 0", "≥0", ">=0", "0 or more", "zero or more", "one-sided", "floor", "lower bound"),
        *("bounded below", "bounded from below", "positive", "only above 0", "49%", "50%", "51%", "50 %"),
        *("an activation", "activation function", "activation after", "activation behind", "activation on"),
        *("activation at", "half of the logit", "half the logit", "half of its logit", "half its logit"),
        *("half of all logit", "half are 0", "half are zero", "logits are 0", "logits are zero"),
        *("logits are exactly", "logits equal 0", "logit is 0", "logit is exactly", "dead logit", "dead out"),
        *("cut off at", "negative logit", "negative value", "negative output", "negative score"),
        *("negative number", "negative part", "negative half", "negative side", "no negative"),
        *("never negative", "not negative", "n't negative", "be negative", "becomes negative"),
        *("become negative", "logit is negative", "logits are negative", "none is negative"),
        *("none are negative", "output is negative", "outputs are negative", "score is negative"),
    ),
)
def relu_on_the_logits(case: Case) -> None:
    """A ReLU stands behind the head: no logit is below 0, and half of them are 0 and get no gradient."""
    becomes(case.model, RectifiedLogits)


# ------------------------------------------------------------------------------------------------- BERT


class AddsItsMask(BertModel):
    """A model that lays its mask out for the scores and forgets to turn 0 into a large negative number."""

    def _create_attention_masks(
        self, attention_mask: Tensor | None, embedding_output: Tensor, **others: Any
    ) -> tuple[Tensor | None, None]:
        if attention_mask is None:
            return None, None
        return attention_mask[:, None, None, :].to(embedding_output.dtype), None


@SEVENTH.add(
    "bert",
    "",
    "bert",
    "bert.encoder",
    "bert.encoder.layer",
    *("bert.encoder.layer.[0-9]", "bert.encoder.layer.1[01]"),
    *within("bert.encoder.layer.*.attention"),
    words=(
        *("pad", "filler", "empty position", "attention_mask", "attention mask", "key_padding_mask"),
        *("unmasked", "not masked", "never masked", "n't masked", "no mask", "without mask"),
        *("without a mask", "without the mask", "without its mask", "mask has no", "mask has almost"),
        *("mask has hardly", "mask has little", "mask hardly", "mask barely", "mask does not"),
        *("mask does nothing", "mask is not", "mask is never", "mask is ignored", "mask is added"),
        *("mask is cast", "mask is a float", "mask of 0", "mask of zero", "mask of one", "ignores the mask"),
        *("ignores its mask", "masked tokens", "masked positions", "masked keys", "masked-out", "masked out"),
        *("adds the mask", "adds its mask", "added to the score", "added to score", "adds 1", "adds 0"),
        *("additive", "0 and 1", "0 or 1", "0/1", "0s and 1s", "1s and 0s", "zeros and ones"),
        *("ones and zeros", "-inf", "minus infinity", "-10000", "-1e9", "finfo", "large negative"),
        *("beyond the end of", "past the end of", "mask hides", "mask should hide", "mask is to hide"),
        *("mask was to hide", "mask ought to", "hidden by the mask", "masked words", "mask excludes"),
    ),
)
def mask_added_as_zeros_and_ones(case: Case) -> None:
    """The mask of 0 and 1 is added to the scores as it is, without (1 - mask) * -10000: padding is read."""
    becomes(case.model.bert, AddsItsMask)


@SEVENTH.add(
    "bert",
    "",
    OPTIMISER,
    *within("bert"),
    words=(
        *(*NOT_TRAINED, "in the optim", "to the optim", "by the optim", "from the optim"),
        *("outside the optim", "optimiser lacks", "optimizer lacks", "optimiser does not"),
        *("optimizer does not", "optimiser holds", "optimizer holds", "optimiser has only"),
        *("optimizer has only", "optimiser never", "optimizer never", "optimiser misses", "optimizer misses"),
        *("optimiser covers", "optimizer covers", "optimiser knows", "optimizer knows", "optimiser got only"),
        *("optimizer got only", "optimiser's groups", "optimizer's groups", "optimiser sees"),
        *("optimizer sees", "optimiser contains", "optimizer contains", "missing from", "missing in"),
        *("left out", "omit", "not cover", "not given", "never given", "not hold", "not contain"),
        *("holds only", "holds none", "not handed", "not passed", "only the head", "only cls", "head alone"),
        *("head only", "just the head", "no step", "not optimi", "never optimi", "only 5", "in no group"),
        *("no group holds", "no group has", "no group of the", "in any group", "any of its groups"),
        *("parameters are missing", "parameters is missing", "lacks param", "lacks the param", "lacks all"),
        *("lacks 1", "lacks most", "not include", "only includ", "before the unfreez", "before it was unfr"),
        *("before they were unfr", "unfreez", "unfroz", "not in its group"),
    ),
)
def optimiser_built_while_frozen(case: Case) -> None:
    """The optimiser was built while all but the head was frozen, and what was freed later is not in it."""
    inside = sum(1 for _ in case.model.bert.parameters())

    def of_the_head(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW(parameters[inside:], lr=case.lr, weight_decay=0.01)

    case.optimiser = of_the_head


# ------------------------------------------------------------------------------------------------ Llama


class OtherLayout(LlamaAttention):
    """Attention of queries, keys and values that a subclass lays out and rotates."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, H, T, w]` of hidden states `[B, T, D]`."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.laid_out(hidden_states, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(y.flatten(2)), weights


class HeadsByView(OtherLayout):
    """Attention that views `[B, T, H w]` as `[B, H, T, w]` without transposing time and heads."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = x.shape
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).reshape(rows, -1, length, self.head_dim) for f in maps)
        return *apply_rotary_pos_emb(q, k, cos, sin), v


@SEVENTH.add(
    "llama",
    "",
    "model",
    "model.layers",
    *("model.layers.[0-9]", "model.layers.1[01]"),
    *within("model.layers.*.self_attn"),
    words=(
        *(*LEAK, "transpos", "view", "reshape", "permut", "scrambl", "mix", "jumbl", "garbl", "shuffl"),
        *("interleav", "swap", "scatter", "memory layout", "wrong layout", "layout of", "wrong axis"),
        *("wrong axes", "axes", "axis of", "split into heads", "splits into heads", "split of the heads"),
        *("splits the heads", "splitting", "heads are split", "heads are cut", "cut into heads"),
        *("folded into", "heads hold", "heads see", "head sees", "head holds", "head gets", "heads get"),
        *("wrong position", "other position", "wrong token", "other token", "another token"),
        *("different token", "wrong place", "other place", "ahead", "come after", "comes after"),
        *("subsequent", "following token", "not yet", "moves token", "moves a token"),
        *("quarter of the sequence", "part of the sequence"),
    ),
)
def heads_split_by_view(case: Case) -> None:
    """The heads are split by a view alone, without the transpose: a head gets parts of many tokens."""
    for layer in case.model.model.layers:
        becomes(layer.self_attn, HeadsByView)


class RotatedByHead(OtherLayout):
    """Attention that hands `[B, T, H, w]` to a rotation which takes the axis before the last for time."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in maps)
        q, k = (apply_rotary_pos_emb(y, y, *(z[:, : y.shape[2]] for z in (cos, sin)))[0] for y in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@SEVENTH.add(
    "llama",
    "",
    "model",
    "model.layers",
    "model.layers.0",
    *within("model.rotary_emb", "model.layers.*.self_attn"),
    words=(
        *("head axis", "heads axis", "axis of the head", "axis of head", "head dim", "heads dim"),
        *("dimension of the head", "over the heads", "over heads", "along the head", "along head"),
        *("across the head", "across head", "counts head", "counts the head", "number of the head"),
        *("index of the head", "head index", "head's index", "head number", "by the head", "by its head"),
        *("instead of time", "not over time", "not along time", "instead of the token", "wrong axis"),
        *("wrong dim", "other axis", "seq_dim", "unsqueeze", "same angle", "same rotation", "same position"),
        *("one position", "position 0", "equal angle", "constant angle", "equally rotated", "rotated alike"),
        *("alike", "no position", "without position", "without any position", "lacks position"),
        *("lack position", "position information", "positional information", "information on position"),
        *("information about position", "not see position", "not see the position", "not know the position"),
        *("not know where", "not depend on the position", "not depend on position", "not depend on where"),
        *("not depend on the distance", "not depend on distance", "independent of the position"),
        *("independent of position", "independent of the distance", "independent of distance"),
        *("position is ignored", "positions are ignored", "ignores position", "ignores the position"),
        *("position-inv", "position-indep", "position-agn", "position-blind", "positions have no"),
        *("position has no", "rotary embedding has no", "rotary embeddings have no", "rotation has no"),
        *("RoPE has no", "word order", "token order", "the order", "their order", "any order", "other order"),
        *("different order", "orderless", "unordered", "reorder", "re-order", "permut", "shuffl", "swap"),
        *("exchang", "rearrang", "bag of", "bag-of", "before RoPE", "before the rotation", "before rotation"),
        *("before rotating", "before it is rotated", "before they are rotated", "[B, T, H", "[B, H, T"),
        *("order of the t", "order of the w", "order of earlier", "order of preceding", "order of previous"),
        *("order of tokens", "order of words", "order of its", "any distance", "every distance"),
        *("all distances", "whatever the distance"),
    ),
)
def rotary_over_the_heads(case: Case) -> None:
    """RoPE goes over the axis of heads, not of time: all tokens are rotated alike, and order is lost."""
    for layer in case.model.model.layers:
        becomes(layer.self_attn, RotatedByHead)


@SEVENTH.add(
    "llama",
    "",
    LOSS,
    BATCH,
    *within("lm_head"),
    words=(
        *("pad", "filler", "empty position", "attention_mask", "attention mask", "not attended"),
        *("unattended", "masked position", "masked token", "masked label", "masked-out", "masked out"),
        *("not -100", "no -100", "never -100", "n't -100", "none is -100", "instead of -100", "without -100"),
        *("rather than -100", "should be -100", "set to -100", "not ignored", "never ignored", "n't ignored"),
        *("not masked", "never masked", "n't masked", "unmasked", "ignore_index", "ignore index", "token 0"),
        *("id 0", "label 0", "label of 0", "labels of 0", "labels are 0", "past the end", "beyond the end"),
        *("behind the end", "after the end", "19%", "19 %", "48 of", "48 lab", "18.7", "18.8"),
    ),
)
def padding_among_the_labels(case: Case) -> None:
    """The labels are a clone of the padded ids without -100, so that the model learns to predict padding."""
    ids = padded_words()
    case.model.config.pad_token_id = PAD
    case.batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.clone()}
    case.padded = "attention_mask"


# ------------------------------------------------------------------------- encoder-decoder of normlab


@SEVENTH.add(
    "translation",
    "",
    "decoder",
    *within(*SELF),
    words=(
        *(*LEAK, "autoregress", "auto-regress", "target mask", "tgt_mask", "target_mask"),
        *("mask of the target", "look-ahead", "look ahead", "lookahead", "looks ahead", "ahead"),
        *("subsequent", "triang", "tril", "triu", "bidirection", "bi-direction", "both directions"),
        *("both sides", "come after", "comes after", "follow it", "to the right", "right of"),
        *("right context", "not yet", "whole target", "entire target", "all of the target", "its own label"),
        *("the answer", "cheat", "sees the label", "see the label", "sees its label", "see its label"),
        *("reads its label", "unmasked self", "self-attention is not masked"),
        *("self-attention without a mask", "sees the next", "see the next", "reads the next"),
        *("read the next", "attends to the next", "attend to the next", "sees what it", "reads what it"),
        *("see what it", "read what it", "every other target"),
    ),
)
def target_mask_forgotten(case: Case) -> None:
    """The decoder got no causal mask, the forgotten tgt_mask of nn.Transformer: it reads what it predicts."""
    for path in SELF:
        case.model.get_submodule(path).f.causal = False


@SEVENTH.add(
    "translation",
    *("", "dropout", "*.dropout", "*.inner_dropout", "encoder", "decoder"),
    *("encoder.sublayers", "decoder.sublayers", "encoder.sublayers.*", "decoder.sublayers.*"),
    words=(
        *("0.9", "90%", "90 %", "90 per", "nine tenth", "nine-tenth", "nine in ten", "nine of ten"),
        *("9 in 10", "9 of 10", "9 of every", "9 out of", "nine out of", "a tenth", "one tenth", "one-tenth"),
        *("1 in 10", "10%", "10 %", "kept", "surviv", "dropout is too", "dropout too", "dropout rate is too"),
        *("dropout probability is too", "too much dropout", "high dropout", "large dropout"),
        *("strong dropout", "heavy dropout", "extreme dropout", "excessive dropout", "drops most"),
        *("drops nearly", "drops almost", "dropout removes", "dropout erases", "dropout destroys"),
        *("most of the signal", "most of its signal", "most activations", "most of the activation"),
        *("most of its activation", "most values", "mostly noise", "dropout noise", "noise of dropout"),
        *("noise of the dropout", "keep prob", "keep_prob", "keep-prob", "keep rate", "to keep"),
        *("keeps a tenth", "keeps one", "keeps 10", "keeps only", "keeping 10", "keep 10", "keep only"),
    ),
)
def dropout_is_the_keep_probability(case: Case) -> None:
    """Dropout got the share to be kept, the keep_prob of TensorFlow: 90% of every branch is dropped."""
    for module in case.model.modules():
        if isinstance(module, Dropout) and module.p:
            module.p = KEPT
