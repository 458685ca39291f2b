"""Ten further mistakes, the most frequent in forums and reviews that no other list has, chosen blindly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert.modeling_bert import BertEncoder

from normlab.nn import PAD, Context, Seq2Seq

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .fifth import LAYER, NO_GRADIENT
from .fourth import CROSS
from .known import LEAK
from .models import GPT, HEADS, Attention, Case

SIXTH = Faults()
NEW_TOKENS = 20
"""Tokens by which a vocabulary was enlarged."""
UNUSED = (
    *(*NO_GRADIENT, "no effect", "no influence", "without effect", "not affect", "not influence"),
    *("changes nothing", "change nothing", "not change the", "nothing depends", "not depend", "never depend"),
    *("independent of", "unused", "not used", "n't used", "never used", "used by nothing"),
    *("used for nothing", "not read", "never read", "no part in", "disconnected", "not connected"),
    *("unconnected", "ignored", "ignores", "discard", "thrown", "bypass", "never learn", "not learn"),
    *("not train", "never train", "never updated", "not updated", "not reach", "never reach"),
    *("not in the graph", "outside the graph"),
)
"""Words for parameters that take no part in the loss."""

# ------------------------------------------------------------------------------------------------ GPT-2


@SIXTH.add(
    "gpt2",
    "h",
    *LAYER,
    *within("h.*.attn"),
    words=(
        *("nan", "not a number", "finite", "non-finite", "nonfinite", "infinit", "0/0", "0 / 0", "diagonal"),
        *("off by one", "off-by-one", "strict", "not itself", "not to itself", "not see itself"),
        *("not attend to itself", "not look at itself", "never itself", "never to itself"),
        *("never attends to itself", "never sees itself", "masks itself", "hides itself"),
        *("masked from itself", "hidden from itself", "excludes itself", "except itself", "own token"),
        *("own key", "own position", "no key", "not one key", "nothing to", "attends to nothing"),
        *("attend to nothing", "sees nothing", "see nothing", "sees no", "attends to no", "empty row"),
        *("row is empty", "row of the mask is empty", "no allowed", "no True", "fully masked"),
        *("entirely masked", "completely masked", "wholly masked", "all masked", "masks every", "masks all"),
        *("all its keys", "all of its keys", "all keys masked", "all keys are masked", "every key is masked"),
        *("every key masked", "all -inf", "only -inf", "first row", "first query", "first token has no"),
        *("first token sees", "first token attends", "without any key", "without a key"),
    ),
)
def causal_mask_hides_the_token_itself(case: Case) -> None:
    """torch.triu without diagonal=1 masks the token itself too: the first has no key left, hence NaN."""
    for block in case.model.h:
        block.attn.mask = ~torch.ones_like(block.attn.mask).triu()


class MaskBehindSoftmax(Attention):
    """Attention whose weights are masked when the softmax has already shared them out over all keys."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        weights = self.weights((q @ k.transpose(-2, -1)) * self.scale)
        y = weights.masked_fill(~self.mask[:length, :length], 0.0) @ v
        return self.dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


@SIXTH.add(
    "gpt2",
    "h",
    *LAYER,
    *within("h.*.attn"),
    words=(
        *(*LEAK, "after softmax", "after the softmax", "behind softmax", "behind the softmax"),
        *("softmax before", "softmax runs before", "softmax comes before", "softmax is taken before"),
        *("before the mask", "before it is masked", "before they are masked", "before masking"),
        *("masked after", "mask after", "mask behind", "mask comes after", "masking after"),
        *("masked too late", "mask is applied after", "softmax sees", "softmax includes", "softmax counts"),
        *("softmax over all", "softmax of all", "denominator", "sum to", "sums to", "sum up", "sum is"),
        *("sums are", "sum of the weights", "sum of its weights", "sum of attention", "row sum", "rows sum"),
        *("add up", "adds up", "in total", "total weight", "total attention", "normaliser", "normalizer"),
        *("renormali", "re-normali", "weights are not normali", "weights not normali", "not normalised over"),
        *("not normalized over", "unnormalised weight", "unnormalized weight", "unnormalised attention"),
        *("unnormalized attention", "not 1", "less than 1", "below 1", "smaller than 1", "under 1", "1/64"),
        *("mass", "weight is lost", "weights are lost", "weight goes to", "weight on masked"),
        *("multiplied by the mask", "zeroed", "set to 0", "set to zero", "early tokens", "first tokens"),
        *("early positions", "first positions", "first token"),
    ),
)
def mask_behind_the_softmax(case: Case) -> None:
    """The causal mask stands behind the softmax, so that the weights of a query sum to less than 1."""
    for block in case.model.h:
        becomes(block.attn, MaskBehindSoftmax)


class WithoutPositions(GPT):
    """A model that never adds its position vectors."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.wte(idx))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@SIXTH.add(
    "gpt2",
    "",
    "drop",
    "h.0",
    *within("wpe"),
    words=(
        *(*UNUSED, "no position", "without position", "without any position", "without a position"),
        *("without the position", "lacks position", "lack position", "position is missing"),
        *("positions are missing", "missing position", "position information", "positional information"),
        *("position is not", "positions are not", "position is never", "positions are never"),
        *("position never", "positions never", "not added", "never added", "not add", "never adds"),
        *("not see the position", "not know the position", "not know where", "word order", "token order"),
        *("the order", "their order", "any order", "different order", "other order", "order of the w"),
        *("order of the t", "order of earlier", "order of preceding", "order of previous", "order of words"),
        *("order of tokens", "unordered", "orderless", "reorder", "permut", "shuffl", "swap", "exchanging"),
        *("rearrang", "bag of", "bag-of", "a set of", "wpe is missing", "position-inv", "position-indep"),
        *("position-agn", "not applied", "never applied"),
    ),
)
def positions_never_added(case: Case) -> None:
    """The forward pass forgets the position vectors: layers read the words alone, and wpe is never used."""
    becomes(case.model, WithoutPositions)


# ------------------------------------------------------------------------------------------------- BERT


class EachLayerOfTheInput(BertEncoder):
    """An encoder whose loop gives every layer the same input and keeps the last output."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        output = hidden_states
        for layer in self.layer:
            output = layer(hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output)


@SIXTH.add(
    "bert",
    "",
    "bert",
    "bert.encoder",
    *within("bert.encoder.layer"),
    words=(
        *(*UNUSED, "overwrit", "overwrote", "lost", "only the last", "only layer 11", "last layer alone"),
        *("last layer only", "just the last", "last one", "a single layer", "one layer deep", "depth of one"),
        *("depth of 1", "depth is 1", "11 of", "eleven", "all but the last", "chain", "unchained"),
        *("not passed", "never passed", "passed on", "not feed", "never feed", "not fed", "never fed"),
        *("same input", "the same tensor", "input of the encoder", "encoder's input", "embeddings as"),
        *("reads the embedding", "read the embedding", "in parallel", "side by side", "skipped", "dead"),
        *("output of the embedding", "embedding output", "gets the embedding", "get the embedding"),
        *("not the output", "previous layer", "layer before"),
    ),
)
def layers_not_chained(case: Case) -> None:
    """The loop over the layers gives each the encoder's input, so that only the last layer has an effect."""
    becomes(case.model.bert.encoder, EachLayerOfTheInput)


@SIXTH.add(
    "bert",
    "bert.embeddings",
    *within("bert.embeddings.word_embeddings", "cls"),
    words=(
        *("rows", "new token", "new word", "new row", "new vector", "added token", "added word", "added row"),
        *("added to the vocab", "resiz", "enlarg", "extended", "extension", "grown vocab", "last 20"),
        *("20 tok", "20 word", "20 of", "20 vector", "20 embed", "20 entries", "20 id", "twenty"),
        *("token 480", "tokens 480", "id 480", "ids 480", "index 480", "from 480", "row 48", "row 49"),
        *("token 48", "token 49", "outlier", "uneven", "two scales", "two populations", "median", "the rest"),
        *("than others", "than the other", "than other", "than most", "typical", "some tokens", "some words"),
        *("some vectors", "few tokens", "few words", "few vectors", "part of the vocab"),
        *("part of the matrix", "end of the vocab", "end of the matrix", "heavy tail", "heavy-tail"),
        *("kurtosis", "not normally", "not normal", "longest", "shortest", "largest row"),
    ),
)
@torch.no_grad()
def new_tokens_at_torch_default(case: Case) -> None:
    """The vocabulary was enlarged by hand: its 20 new rows have torch's deviation of 1.0, not 0.02."""
    case.model.bert.embeddings.word_embeddings.weight[-NEW_TOKENS:].normal_(0.0, 1.0)


@SIXTH.add(
    "bert",
    OPTIMISER,
    *within("bert", "cls"),
    words=(
        *("SGD", "plain gradient", "gradient descent", "not Adam", "no Adam", "instead of Adam"),
        *("in place of Adam", "rather than Adam", "without Adam", "for Adam", "rate of Adam", "Adam's"),
        *("AdamW's", "like Adam", "than Adam", "adaptive", "normalised step", "normalized step"),
        *("second moment", "step is too small", "steps are too small", "step too small", "steps too small"),
        *("update is too small", "updates are too small", "update too small", "updates too small"),
        *("rate is too small", "rate too small", "lr is too small", "lr too small", "too small a"),
        *("too small an", "too small for", "too small to", "small step", "small rate", "small learning"),
        *("small update", "small lr", "rate is too low", "rate too low", "lr is too low", "lr too low"),
        *("too low a", "too low for", "too little", "low rate", "low learning", "little", "hardly", "barely"),
        *("scarcely", "almost nothing", "almost no", "next to nothing", "tiny", "slow", "negligible"),
        *("millionth", "stands still", "stand still", "standstill", "of its size", "of their size"),
        *("steps are too short", "step is too short", "not move", "no progress", "far too small"),
        *("much too small", "far too low", "much too low", "updates are small", "update is small"),
        *("steps are small", "step is small"),
    ),
)
def sgd_at_the_rate_of_adam(case: Case) -> None:
    """SGD took the place of AdamW and kept its rate of 1e-4, so that a step hardly moves a weight."""
    case.optimiser = partial(SGD, lr=case.lr)


# ------------------------------------------------------------------------------------------------ Llama


@SIXTH.add(
    "llama",
    "",
    LOSS,
    BATCH,
    *within("lm_head"),
    words=(
        *("all -100", "only -100", "are -100", "is -100", "was -100", "being -100", "to -100", "equal -100"),
        *("equals -100", "but -100", "-100 everywhere", "-100 alone", "-100 at every", "-100 at all"),
        *("-100 in every", "-100 in all", "-100 for all", "-100 for every", "-100 throughout", "all ignored"),
        *("all are ignored", "ignore every", "ignores every", "ignore all", "ignores all"),
        *("every label is ignored", "all labels are ignored", "all targets are ignored"),
        *("every target is ignored", "every token is ignored", "all tokens are ignored"),
        *("every position is ignored", "all positions are ignored", "ignored at every", "ignored everywhere"),
        *("labels are all", "label is masked", "labels are masked", "masks all", "masks every", "all masked"),
        *("masked out", "no label", "no target", "no valid", "without label", "without a label"),
        *("without any label", "without target", "without a target", "without any target", "not one label"),
        *("not a single", "not one token", "none of the label", "none of the token", "none of the target"),
        *("none of the position", "no token is", "no token has", "no token count", "no token to"),
        *("no word is", "no word has", "no position is pred", "no position has a", "no position count"),
        *("no predicted", "nothing is predicted", "nothing to predict", "nothing to learn"),
        *("nothing to train", "0 label", "0 target", "0 token", "0 predicted", "zero label", "zero target"),
        *("zero token", "zero predicted", "0 of the", "0 of its", "0 of 2", "mean over nothing"),
        *("mean of nothing", "mean over no", "mean of no", "mean over 0", "mean of 0", "mean over zero"),
        *("mean over an empty", "mean of an empty", "empty", "0/0", "0 / 0", "divides by 0"),
        *("divides by zero", "division by 0", "division by zero", "divided by 0", "divided by zero"),
        *("finite logits", "logits are finite", "logits are all finite", "of -100", "than -100"),
        *("except -100", "is the ignore", "are the ignore", "is ignore_index", "are ignore_index"),
        *("equals ignore_index", "equal ignore_index"),
    ),
)
def every_label_ignored(case: Case) -> None:
    """The collator did not find the answer's template and set all labels to -100: the loss is 0 / 0."""
    case.batch["labels"] = torch.full_like(case.batch["labels"], -100)


@SIXTH.add(
    "llama",
    "model.layers",
    *("model.layers.[0-9]", "model.layers.1[01]"),
    *within("model.layers.*.self_attn"),
    words=(
        *("deviation", "std", "standard dev", "variance", "initiali", "initial scale", "initial weight"),
        *("N(0", "unit normal", "randn", "standard normal", "drawn", "magnitude", "too large", "too big"),
        *("large weight", "large init", "huge", "times larger", "times too", "times the usual", "times its"),
        *("times as", "times more", "larger than", "bigger than", "orders of", "saturat", "one-hot"),
        *("one hot", "single key", "one key", "single token", "to one token", "hard max", "hardmax"),
        *("argmax", "entropy", "peaked", "sharp", "concentrat", "collapse", "degenerate", "explod", "blow"),
        *("outweigh", "dominat", "overwhelm", "drown", "swamp", "grows", "growth", "times 0.02"),
        *("scores reach", "scores up to", "large scores"),
    ),
)
@torch.no_grad()
def attention_drawn_by_randn(case: Case) -> None:
    """The matrices of attention are drawn by torch.randn, with a deviation of 1.0 where 0.02 is usual."""
    for layer in case.model.model.layers:
        for p in layer.self_attn.parameters():
            p.normal_(0.0, 1.0)


# ------------------------------------------------------------------------- encoder-decoder of normlab


def loss_of_the_previous_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the target token before each position."""
    logits, labels = model(**batch)[:, 1:], batch["target_in"][:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@SIXTH.add(
    "translation",
    "",
    LOSS,
    BATCH,
    "embedding",
    words=(
        *("previous", "preced", "prior token", "prior word", "earlier label", "earlier target"),
        *("one earlier", "step earlier", "position earlier", "token earlier", "predicts an earlier"),
        *("predict an earlier", "predict earlier", "predicts earlier", "token before", "word before"),
        *("tokens before", "words before", "one before", "comes before", "came before", "come before"),
        *("stands before", "position before", "backward", "wrong way", "wrong direction", "wrong side"),
        *("wrong sign", "other way", "other direction", "opposite", "revers", "inverted shift", "already"),
        *("has seen", "have seen", "has read", "have read", "can read", "reads its", "sees its label"),
        *("sees its target", "sees the label", "sees the target", "sees its own label"),
        *("sees its own target", "see its label", "see its target", "see the label", "see the target"),
        *("has in its input", "known to", "copy", "copies", "copied", "trivial", "one behind", "step behind"),
        *("to the left", "shifted back", "shifted right", "shifted to the right", "shift by -1"),
        *("shifted by -1", "one back", "step back", "in the past", "past token", "past word", "not the next"),
        *("instead of the next", "rather than the next", "never the next", "t - 1", "t-1", "identity"),
        *("one position too", "too early", "too late"),
    ),
)
def shifted_the_wrong_way(case: Case) -> None:
    """Logits and labels are shifted the wrong way, so that the model learns to repeat the previous token."""
    case.loss = loss_of_the_previous_token


def decode_without_memory_mask(
    model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor
) -> Tensor:
    """Decode without the mask of the memory."""
    context = Context(padding_mask=target_in != PAD, memory=memory)
    return model.decoder(model.embed(target_in), context)


@SIXTH.add(
    "translation",
    "decoder",
    *within(*CROSS),
    words=(
        *("pad", "memory mask", "memory_mask", "memory_key_padding", "mask of the memory"),
        *("mask of the source", "mask for the memory", "mask for the source", "source mask", "source's mask"),
        *("encoder mask", "unmasked", "not masked", "never masked", "no mask", "without mask"),
        *("without a mask", "without the mask", "without its mask", "without any mask", "mask is missing"),
        *("missing mask", "mask is not passed", "mask is never passed", "mask is ignored"),
        *("ignores the mask", "past the end of the source", "beyond the end of the source"),
        *("behind the end of the source", "empty position", "filler", "shorter sentence", "shorter source"),
        "length of the source",
    ),
)
def memory_mask_forgotten(case: Case) -> None:
    """Cross-attention gets no mask of the source's padding, the forgotten memory_key_padding_mask."""
    case.model.decode = MethodType(decode_without_memory_mask, case.model)
