"""Ten mistakes of Transformer code, invented without knowledge of the rules that look for them."""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.models.bert.modeling_bert import BertOutput

from normlab.nn import PAD, Context, Seq2Seq

from .fault import OPTIMISER, Faults, becomes, within
from .known import LEAK
from .models import LAYERS, Attention, Case

UNSEEN = Faults()

# ------------------------------------------------------------------------------------------------ GPT-2


class SoftmaxOverQueries(Attention):
    """Attention whose weights of a key sum to 1 over the queries, so that later queries count."""

    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-2)


@UNSEEN.add("gpt2", "h.0", *within("h.*.attn"), words=(*LEAK, "softmax", "sum"))
def softmax_over_queries(case: Case) -> None:
    """The softmax of attention goes over the queries, not over the keys."""
    for block in case.model.h:
        becomes(block.attn, SoftmaxOverQueries)


class NormOverTime(nn.LayerNorm):
    """A layer norm with its mean and variance over axis 1, which is time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.LayerNorm's argument
        variance, mean = torch.var_mean(input, 1, keepdim=True, correction=0)
        return (input - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@UNSEEN.add("gpt2", "h.4", *within("h.4.ln_1"))
def norm_over_time(case: Case) -> None:
    """A norm of layer 4, counted from 0, takes its mean and variance over time, not over features."""
    becomes(case.model.h[4].ln_1, NormOverTime)


class AlwaysDropout(nn.Dropout):
    """Dropout by the function, which drops in evaluation too unless it is told not to."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Dropout's argument
        return F.dropout(input, self.p)


@UNSEEN.add("gpt2", *within("h.*.mlp"), words=("dropout", "random", "evaluation", "nondetermin", "determin"))
def dropout_in_evaluation(case: Case) -> None:
    """The feed-forwards call F.dropout without training=self.training, so that evaluation is random."""
    for block in case.model.h:
        becomes(block.mlp.dropout, AlwaysDropout)


# ------------------------------------------------------------------------------------------------- BERT


class SumBehindNorm(BertOutput):
    """The end of a layer with the sum on the wrong side of the norm."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states))) + input_tensor


@UNSEEN.add("bert", *within("bert.encoder.layer.8"))
def residual_behind_the_norm(case: Case) -> None:
    """In layer 8, counted from 0, the residual is added behind the norm, unlike in all others."""
    becomes(case.model.bert.encoder.layer[8].output, SumBehindNorm)


@UNSEEN.add(
    "bert",
    *within("bert.encoder.layer.*.intermediate"),
    words=("activation", "nonlinear", "non-linear", "is linear", "linear map"),
)
def no_activation(case: Case) -> None:
    """The feed-forwards have no activation, so that their two matrices are one linear map."""
    for layer in case.model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.Identity()


# ------------------------------------------------------------------------------------------------ Llama


@UNSEEN.add(
    "llama", *within("model.layers"), words=("share", "tie", "repeat", "identical", "one module", "the same")
)
def one_layer_twelve_times(case: Case) -> None:
    """The list of layers holds one layer twelve times, as [layer] * 12 gives it."""
    case.model.model.layers = nn.ModuleList([case.model.model.layers[0]] * LAYERS)


@UNSEEN.add(
    "llama",
    OPTIMISER,
    *within("model.norm", "model.layers.*.*_layernorm"),
    words=("optim", "updat", "step", "train"),
)
def norms_not_in_the_optimiser(case: Case) -> None:
    """The optimiser got the matrices alone: the norms, a group without weight decay, were forgotten."""

    def of_matrices(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW([p for p in parameters if p.ndim >= 2], lr=case.lr, weight_decay=0.1)

    case.optimiser = of_matrices


@UNSEEN.add("llama", *within("model.norm", "model.layers.*.*_layernorm"))
def epsilon_of_the_wrong_sign(case: Case) -> None:
    """The epsilon of every RMSNorm is 1e5 where 1e-5 was meant, so that all branches are silent."""
    for module in case.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e5


# ------------------------------------------------------------------------- encoder-decoder of normlab


def encode_padding(model: Seq2Seq, source: Tensor) -> tuple[Tensor, Tensor]:
    """Encode with a mask that is True where there is padding."""
    mask = source == PAD
    return model.encoder(model.embed(source), Context(padding_mask=mask)), mask


CROSS = tuple(f"decoder.sublayers.{i}" for i in range(1, 3 * LAYERS // 2, 3))


@UNSEEN.add(
    "translation",
    "encoder",
    *within("encoder.sublayers.0", "encoder.sublayers.*.f", *CROSS),
    words=("pad", "mask"),
)
def inverted_mask(case: Case) -> None:
    """The mask of the source is inverted, so that tokens attend to padding."""
    case.model.encode = MethodType(encode_padding, case.model)


def decode_itself(model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
    """Decode with the target's own embeddings in the place of the memory."""
    mask, x = target_in != PAD, model.embed(target_in)
    return model.decoder(x, Context(padding_mask=mask, memory=x, memory_mask=mask))


@UNSEEN.add(
    "translation",
    "decoder",
    *within("encoder", *CROSS),
    words=(*LEAK, "gradient", "source", "memory", "cross"),
)
def cross_attention_to_the_target(case: Case) -> None:
    """Cross-attention reads the embedded target instead of the encoder's output."""
    case.model.decode = MethodType(decode_itself, case.model)
