"""Ten further mistakes, chosen from what cost people time in public code, without knowledge of the rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from normlab.nn import PAD

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .models import Block, Case, padded_words, target_loss

FIFTH = Faults()
EOS = 2
"""Token id of the end of a text, as in Llama's config."""
LAYER = ("h.[0-9]", "h.1[01]")
"""Patterns of GPT-2's layers without what is inside them."""
NO_GRADIENT = (
    *("no grad", "zero grad", "without grad", "without a grad", "without any grad", "not get a grad"),
    *("not receive a grad", "not have a grad", "never gets a grad", "never get a grad", "never receive"),
    *("gradient is 0", "gradient is zero", "gradient is exactly", "gradient is None", "gradient of 0"),
    *("gradients are 0", "gradients are zero", "gradients are None", "gradients are all", "gradient of zero"),
    *("gradient of exactly", "gradient stops", "gradient ends", "gradient is cut", "gradient does not"),
    *("gradients do not", "gradient never", "none gets", "none of them gets", "not reached by"),
)
"""Words for parameters that no gradient reaches."""

# ------------------------------------------------------------------------------------------------ GPT-2


class PastItsNorm(Block):
    """A layer that computes the norm of its feed-forward and passes on what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        _ = self.ln_2(x)
        return x + self.mlp(x)


@FIFTH.add(
    "gpt2",
    "h",
    *LAYER,
    *within("h.*.ln_2", "h.*.mlp"),
    words=(
        *NO_GRADIENT,
        *("unused", "not used", "never used", "used by nothing", "used for nothing", "not read"),
        *("never read", "never learn", "not learn", "not trained", "never trained", "no effect"),
        *("no influence", "not affect", "not change the", "changes nothing", "not depend", "ignore"),
        *("disconnected", "thrown", "discard", "skips its norm", "skips the norm", "skips ln_2", "bypass"),
        *("past its norm", "past the norm", "past ln_2", "around its norm", "around the norm", "around ln_2"),
        *("unnorm", "un-norm", "not norm", "never norm", "no norm", "no LayerNorm", "without norm"),
        *("without a norm", "without its norm", "without the norm", "without LayerNorm", "without a Layer"),
        *("raw", "reads the residual", "reads the stream", "before the norm", "instead of the norm"),
        *("unit variance", "unit deviation"),
    ),
)
def norm_of_the_feed_forward_unused(case: Case) -> None:
    """The feed-forwards read the residual stream itself: the output of their norm, ln_2, is never used."""
    for block in case.model.h:
        becomes(block, PastItsNorm)


class DropsTheStream(Block):
    """A layer whose dropout stands behind the sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x + self.attn(self.ln_1(x)))
        return self.drop(x + self.mlp(self.ln_2(x)))


@FIFTH.add(
    "gpt2",
    "",
    "h",
    *LAYER,
    "h.*.drop",
    words=(
        *("dropout", "drop-out", "dropped", "drops", "survive", "random mask", "at random", "randomly"),
        *("train mode", "training mode", "eval mode", "evaluation mode", "from eval", "training and eval"),
        *("train and eval", "noise", "noisy"),
    ),
)
def dropout_of_the_stream(case: Case) -> None:
    """Dropout acts on the sum of stream and branch, so that 24 times a tenth of the whole stream is lost."""
    for block in case.model.h:
        becomes(block, DropsTheStream)
        block.attn.dropout, block.mlp.dropout = nn.Identity(), nn.Identity()
        block.drop = nn.Dropout(0.1)


@FIFTH.add(
    "gpt2",
    "drop",
    "h.0",
    *within("wte", "wpe"),
    words=(
        *("deviation", "std", "standard", "variance", "spread", "N(0", "unit normal", "initiali", "default"),
        *("too large", "too small", "too big", "larger", "smaller", "bigger", "times", "scale", "magnitude"),
        *("huge", "outweigh", "dominat", "drown", "swamp", "overwhelm", "hide", "bury", "buried"),
        *("mostly position", "little about the word", "little about the token", "hardly depend"),
        *("barely depend", "hardly distinguish", "almost the same", "nearly the same", "share of"),
    ),
)
@torch.no_grad()
def positions_at_torch_default(case: Case) -> None:
    """The position vectors keep torch's deviation of 1.0, and words of deviation 0.02 drown in them."""
    case.model.wpe.reset_parameters()


# ------------------------------------------------------------------------------------------------- BERT


@FIFTH.add(
    "bert",
    "",
    "bert",
    "bert.encoder",
    "bert.encoder.layer.0",
    *within("bert.encoder.layer.*.attention"),
    words=(
        *("causal", "is_decoder", "decoder", "autoregress", "auto-regress", "triang", "tril", "triu"),
        *("unidirection", "one direction", "one-direction", "one side", "bidirection", "bi-direction"),
        *("later", "future", "following", "subsequent", "come after", "comes after", "behind it", "ahead"),
        *("earlier", "previous", "preceding", "prior", "before it", "come before", "to the left", "left of"),
        *("left context", "left-to-right", "left to right", "to the right", "right of", "right context"),
    ),
)
def encoder_built_as_a_decoder(case: Case) -> None:
    """A config with is_decoder=True makes attention causal: a masked word sees only the words before it."""
    config = case.model.config
    config.is_decoder, config.use_cache = True, False
    case.model = tf.BertForMaskedLM(config)


@FIFTH.add(
    "bert",
    "",
    LOSS,
    BATCH,
    *within("cls"),
    words=(
        *("unmasked", "not masked", "n't masked", "not mask", "never masked", "no mask stands", "not hidden"),
        *("non-masked", "non masked", "visible", "in plain sight", "already given", "already in"),
        *("already stand", "copy", "copies", "copied", "trivial", "identity", "identical to the in"),
        *("equal to the in", "equals the in", "equal the in", "equal their in", "equals its in"),
        *("same as the in", "itself", "its own input", "stands in the in", "stand in the in", "is in the in"),
        *("are in the in", "unchanged in the in", "are the in", "is the in", "shown", "can see", "sees"),
        *("can read", "not -100", "none is -100", "no -100", "without -100", "instead of -100"),
        *("every word", "every token", "every position", "all words", "all tokens", "all positions"),
        *("all of the words", "all of the tokens", "whole sequence", "100% of", "usual 15", "not 15"),
        *("rather than 15", "instead of 15", "instead of the 15", "rather than the 15"),
    ),
)
def every_word_is_a_label(case: Case) -> None:
    """Nobody set the labels of unmasked words to -100, so that most of the loss is for copying the input."""
    ids = padded_words()
    case.batch["labels"] = ids.masked_fill(ids == PAD, -100)


# ------------------------------------------------------------------------------------------------ Llama


class Checkpointed(LlamaDecoderLayer):
    """A layer under the older, reentrant checkpointing, which sees its positional arguments alone."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return checkpoint(partial(super().forward, **kwargs), hidden_states, use_reentrant=True)


@FIFTH.add(
    "llama",
    "",
    "model",
    "model.norm",
    *within("model.layers"),
    words=(
        *NO_GRADIENT,
        *("checkpoint", "reentrant", "re-entrant", "recomput", "requires_grad", "require grad"),
        *("requires grad", "requiring grad", "detach", "graph", "cut off", "disconnected"),
        *("never learn", "not learn", "not trained", "never trained", "not train", "never updated"),
        *("not updated", "not updat"),
    ),
)
def checkpoints_behind_a_frozen_embedding(case: Case) -> None:
    """The embedding is frozen, and reentrant checkpoints give no gradient if their input requires none."""
    case.model.model.embed_tokens.requires_grad_(False)
    for layer in case.model.model.layers:
        becomes(layer, Checkpointed)


@FIFTH.add(
    "llama",
    OPTIMISER,
    *within("model", "lm_head"),
    words=(
        *("rate of 0.1", "rate 0.1", "rate is 0.1", "rate (0.1", "rate = 0.1", "rate=0.1", "0.1 is"),
        *("lr of 0.1", "lr 0.1", "lr is 0.1", "lr=0.1", "lr = 0.1", "1e-1", "1e-01"),
        *("rate is too large", "rate is too big", "rate too large", "too high", "too large a rate"),
        *("rate is high", "rate is large", "lr is too large", "high rate", "high learning", "large rate"),
        *("large learning", "large lr", "large step", "large update", "big step", "huge step", "huge update"),
        *("step is too large", "steps are too large", "step too large", "too large a step"),
        *("update is too large", "updates are too large", "update too large", "updates too large"),
        *("times larger", "times higher", "times its", "times their", "times the weight", "times the dev"),
        *("larger than its", "larger than the weight", "more than its", "more than their", "as large as"),
        *("of its size", "of their size", "orders of magnitude", "far above", "above the usual"),
        *("diverge", "overshoot", "explod", "blow", "destroy", "overwrit", "rewrit"),
    ),
)
def rate_of_sgd_given_to_adamw(case: Case) -> None:
    """AdamW has the rate of 0.1 of a recipe for SGD, so that one step moves a weight by 5 deviations."""
    case.lr = 0.1
    case.optimiser = partial(AdamW, lr=case.lr, betas=(0.9, 0.95), weight_decay=0.1)


@FIFTH.add(
    "llama",
    "",
    LOSS,
    BATCH,
    *within("lm_head"),
    words=(
        *("eos", "end-of", "end of", "end token", "ending", "</s>", "stop", "terminat", "token 2", "id 2"),
        *("final token", "final word", "last token of", "last word of", "pad_token", "pad token is"),
        *("taken for pad", "counted as pad", "treated as pad", "seen as pad", "mistaken for pad"),
        *("same id as", "also the pad", "also pad", "doubles as", "never a label", "never a target"),
        *("never label", "never predict", "never asked", "never among", "never in the l"),
        *("attended but", "attended tokens have", "attended words have"),
    ),
)
def end_of_text_taken_for_padding(case: Case) -> None:
    """Padding has the id of the end of a text, so that -100 for padding removes every end of a text too."""
    words = padded_words()
    text = words != PAD
    ends = text & ~F.pad(text[:, 1:], (0, 1))
    ids = words.masked_fill(~text | ends, EOS)
    case.model.config.pad_token_id = case.model.config.eos_token_id
    case.batch |= {
        "input_ids": ids,
        "attention_mask": text.long(),
        "labels": ids.masked_fill(ids == EOS, -100),
    }
    case.padded = "attention_mask"


# ------------------------------------------------------------------------- encoder-decoder of normlab


def wrapped_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the value of the loss as a new tensor, which silences the error of ``backward``."""
    return torch.tensor(target_loss(model, batch).item(), requires_grad=True)


@FIFTH.add(
    "translation",
    "",
    LOSS,
    *("embedding", "encoder", "decoder", "decoder.end"),
    words=(
        *NO_GRADIENT,
        *("no parameter", "not one parameter", "none of the param", "graph", "grad_fn", "detach", "backward"),
        *("backprop", "back-prop", "cut off", "disconnected", "not connected", "not depend", "independent"),
        *("constant", "leaf", "new tensor", "fresh tensor", "item()", "torch.tensor", "wrapped"),
        *("nothing learns", "nothing is learn", "nothing is train", "not differentiable"),
    ),
)
def loss_in_a_new_tensor(case: Case) -> None:
    """The loss is wrapped in a new tensor that requires a gradient, so that no parameter gets any."""
    case.loss = wrapped_loss


@FIFTH.add(
    "translation",
    "",
    OPTIMISER,
    *within("embedding", "encoder", "decoder"),
    words=(
        *("in the optim", "to the optim", "by the optim", "from the optim", "outside the optim", "no group"),
        *("not hold", "holds no", "holds param", "holds tensors", "holds other", "copy", "copies", "copied"),
        *("clone", "other tensor", "other param", "different tensor", "different param", "another model"),
        *("other model", "former", "old param", "stale", "foreign", "not the model's", "not of the model"),
        *("not in the model", "no parameter", "none of the", "never updat", "not updat", "no updat"),
        *("never mov", "not mov", "never step", "not step", "never chang", "not chang", "no change"),
        *("changes nothing", "changes no", "unchanged", "stay the same", "stays the same", "no effect"),
        *("without effect", "never train", "not train", "never learn", "not learn"),
    ),
)
def optimiser_of_a_former_model(case: Case) -> None:
    """The optimiser was built before the model was built anew, so that it holds no parameter of the model."""

    def of_former(parameters: list[nn.Parameter]) -> AdamW:
        former = [nn.Parameter(p.detach().clone()) for p in parameters]
        return AdamW(former, lr=case.lr, betas=(0.9, 0.98), weight_decay=1e-4)

    case.optimiser = of_former
