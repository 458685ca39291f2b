"""Faults that people have met, planted in the four architectures as their code would do it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from normlab.nn import Sublayer

from .fault import OPTIMISER, Faults, becomes, within
from .models import DEPTH_SCALED, DEVIATION, Block, Case

KNOWN = Faults()
ROLES = "embedding query key value output ffn_in ffn_out"
START: dict[str, Any] = dict.fromkeys(ROLES.split(), DEVIATION)
GPT2_START = START | {"output": DEPTH_SCALED, "ffn_out": DEPTH_SCALED}
LLAMA_START = START | {"ffn_gate": DEVIATION, "head": DEVIATION}
"""Deviations by role that were meant; ``truncated_at``, in deviations, and ``tied`` stand beside them."""
LEAK = ("causal", "later", "future", "leak")
"""Words for a later token that changes an earlier logit."""

# ------------------------------------------------------------------------------------------------ GPT-2


@KNOWN.add("gpt2", "h", "h.11", *within("ln_f", "lm_head"), words=("norm", "LayerNorm", "unnorm"))
def no_final_norm(case: Case) -> None:
    """The stack ends without its final norm."""
    case.model.ln_f = nn.Identity()


@KNOWN.add("gpt2", *within("wte", "lm_head"))
@torch.no_grad()
def tied_deviation_of_one(case: Case) -> None:
    """The tied embedding has torch's default deviation of 1.0, so that the logits are huge."""
    case.model.wte.weight.normal_(0.0, 1.0)


@KNOWN.add("gpt2", *within("h.*.attn"), words=("scale", "unscaled", "sqrt", "√", "root", "divide"))
def unscaled_attention(case: Case) -> None:
    """The scores of attention are not divided by the root of the head's width."""
    for block in case.model.h:
        block.attn.scale = 1.0


class WithoutSkip(Block):
    """A layer whose second sum was forgotten."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return self.mlp(self.ln_2(x))


@KNOWN.add("gpt2", *within("h.5"))
def missing_residual(case: Case) -> None:
    """The feed-forward of layer 5, counted from 0, has no residual."""
    becomes(case.model.h[5], WithoutSkip)


@KNOWN.add("gpt2", "h.0", *within("h.*.attn"), words=LEAK)
def no_causal_mask(case: Case) -> None:
    """No layer has a causal mask."""
    for block in case.model.h:
        block.attn.mask = torch.ones_like(block.attn.mask)


@KNOWN.add("gpt2", "h.3", *within("h.3.attn"))
def mask_overwritten_by_load(case: Case) -> None:
    """A load from an encoder's checkpoint overwrote the causal mask of layer 3."""
    loaded = {"h.3.attn.mask": torch.ones_like(case.model.h[3].attn.mask)}
    case.model.load_state_dict(loaded, strict=False)


@KNOWN.add("gpt2", *within("h.*.attn.c_proj", "h.*.mlp.c_proj"), declared=GPT2_START)
@torch.no_grad()
def depth_scale_never_applied(case: Case) -> None:
    """The output matrices were never scaled by the depth."""
    for block in case.model.h:
        block.attn.c_proj.weight.normal_(0.0, DEVIATION)
        block.mlp.c_proj.weight.normal_(0.0, DEVIATION)


@KNOWN.add("gpt2", OPTIMISER, words=("clip",))
def clipping_divides_the_step(case: Case) -> None:
    """Gradients are clipped at 0.01 where 1.0 was meant, which divides SGD's step by more than 100."""
    case.lr, case.max_grad_norm = 0.1, 0.01
    case.optimiser = partial(SGD, lr=case.lr, momentum=0.9, nesterov=True)


@KNOWN.add("gpt2", *within("h"))
def layers_in_a_plain_list(case: Case) -> None:
    """The layers stand in a plain list, so that no optimiser sees them."""
    layers = list(case.model.h)
    del case.model.h
    case.model.h = layers


# ------------------------------------------------------------------------------------------------- BERT


@KNOWN.add("bert", *within("bert.encoder.layer.4"))
def frozen_layer(case: Case) -> None:
    """Layer 4, counted from 0, is frozen."""
    case.model.bert.encoder.layer[4].requires_grad_(False)


@KNOWN.add("bert", "bert.embeddings.dropout", "bert.encoder.layer.*.dropout")
def dropout_of_one(case: Case) -> None:
    """All hidden dropouts are 1.0, so that nothing is left in training."""
    for path, module in case.model.named_modules():
        if path.endswith((".output.dropout", "embeddings.dropout")):
            module.p = 1.0


@KNOWN.add("bert", *within("bert.encoder.layer.2.intermediate"))
def matrix_at_torch_default(case: Case) -> None:
    """One matrix of layer 2 keeps the default initialisation of nn.Linear."""
    case.model.bert.encoder.layer[2].intermediate.dense.reset_parameters()


@KNOWN.add(
    "bert",
    "bert",
    "bert.encoder",
    "bert.encoder.layer.0",
    *within("bert.encoder.layer.*.attention"),
    words=("pad", "mask"),
)
def padding_leak(case: Case) -> None:
    """The attention mask is not passed on, so that words attend to padding."""

    def without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": None}

    case.model.bert.register_forward_pre_hook(without_mask, with_kwargs=True)


@KNOWN.add(
    "bert",
    "bert.embeddings",
    "bert.embeddings.position_ids",
    *within("bert.embeddings.position_embeddings"),
    words=("position", "buffer"),
)
def constant_position_ids(case: Case) -> None:
    """After to_empty nobody filled the buffer of positions, so that every token is at position 0."""
    case.model.bert.embeddings.position_ids = torch.zeros_like(case.model.bert.embeddings.position_ids)


@KNOWN.add(
    "bert",
    *within("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    declared={"tied": True},
    words=("tie", "tying", "untied", "share"),
)
def broken_tie(case: Case) -> None:
    """A copy for the optimiser broke the tie between embedding and head."""
    head = case.model.cls.predictions.decoder
    head.weight = nn.Parameter(head.weight.detach().clone())


# ------------------------------------------------------------------------------------------------ Llama


@KNOWN.add("llama", *within("model.layers.7"))
@torch.no_grad()
def layer_times_thirty(case: Case) -> None:
    """All matrices of layer 7, counted from 0, are 30 times too large."""
    for p in case.model.model.layers[7].parameters():
        if p.ndim == 2:
            p.mul_(30)


@KNOWN.add("llama", "model.layers.7", *within("model.layers.6"))
def detach_in_mid_model(case: Case) -> None:
    """A hook that collected features detaches the output of layer 6, counted from 0."""
    case.model.model.layers[6].register_forward_hook(lambda module, args, output: output.detach())


@KNOWN.add(
    "llama",
    *within("model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"),
    declared=LLAMA_START | {"output": DEPTH_SCALED, "ffn_out": DEPTH_SCALED},
)
@torch.no_grad()
def depth_scale_on_the_wrong_matrix(case: Case) -> None:
    """The depth scaling of the feed-forward went to its inner matrix up_proj instead of down_proj."""
    for layer in case.model.model.layers:
        layer.self_attn.o_proj.weight.normal_(0.0, DEPTH_SCALED)
        layer.mlp.up_proj.weight.normal_(0.0, DEPTH_SCALED)


@KNOWN.add(
    "llama",
    *within("model.layers.*.mlp"),
    declared=LLAMA_START | {"truncated_at": 3.0},
    words=("trunc", "tail", "cut"),
)
@torch.no_grad()
def truncation_at_100_deviations(case: Case) -> None:
    """trunc_normal_ got bounds in deviations, so that the feed-forward is cut at 100 deviations."""
    for path, p in case.model.named_parameters():
        if p.ndim == 2:
            bound = 2.0 if ".mlp." in path else 3 * DEVIATION
            nn.init.trunc_normal_(p, std=DEVIATION, a=-bound, b=bound)


@KNOWN.add("llama", *within("model.rotary_emb"))
def rotary_buffer_of_zeros(case: Case) -> None:
    """After to_empty nobody filled the frequencies of the rotary embedding: all are 0."""
    case.model.model.rotary_emb.inv_freq.zero_()


@KNOWN.add("llama", OPTIMISER, *within("model", "lm_head"), words=("bf16", "bfloat16", "round"))
def updates_lost_in_bf16(case: Case) -> None:
    """Weights and optimiser are bfloat16 and the rate is 1e-5, so that most updates round to nothing."""
    case.model.to(torch.bfloat16)
    case.optimiser, case.lr = partial(AdamW, lr=1e-5), 1e-5


# ------------------------------------------------------------------------- encoder-decoder of normlab


@KNOWN.add("translation", *within("decoder.sublayers.8"))
def zeros_where_a_hook_was_skipped(case: Case) -> None:
    """An init hook was skipped: the inner matrix of a feed-forward of the decoder is zero and stays so."""
    nn.init.zeros_(case.model.decoder.sublayers[8].f.inner.weight)


@KNOWN.add("translation", *within("encoder.sublayers.5"))
def norm_gain_of_zeros(case: Case) -> None:
    """The gain of one norm of the encoder was never filled: it is zero."""
    nn.init.zeros_(case.model.encoder.sublayers[5].place.norm.weight)


@KNOWN.add("translation", "decoder", *within("encoder"), words=("gradient", "detach"))
def detached_memory(case: Case) -> None:
    """The decoder reads the encoder's output without its graph, so that the encoder does not learn."""
    case.model.encoder.register_forward_hook(lambda module, args, output: output.detach())


@KNOWN.add("translation", *within("embedding"))
@torch.no_grad()
def embedding_deviation_of_one(case: Case) -> None:
    """The shared embedding has a deviation of 1.0, which the model multiplies by the root of the width."""
    case.model.embedding.weight.normal_(0.0, 1.0)


class WithoutStream(Sublayer):
    """A sublayer that returns its branch alone."""

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.f(self.place.read(stream), *args, **kwargs)


@KNOWN.add("translation", *within("decoder.sublayers.10"))
def sublayer_without_residual(case: Case) -> None:
    """A cross-attention of the decoder has no residual."""
    becomes(case.model.decoder.sublayers[10], WithoutStream)


@KNOWN.add("translation", *within("encoder.sublayers.[01]"))
def frozen_first_layer(case: Case) -> None:
    """The encoder's first layer is frozen."""
    for sublayer in case.model.encoder.sublayers[:2]:
        sublayer.requires_grad_(False)
