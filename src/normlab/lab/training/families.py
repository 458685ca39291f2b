"""Hugging Face classes as families: which parts each has, and a decoder's weights under its names.

A recipe fits a family that has each of its parts. What the weights mean is read from the modules, not from
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from normlab.base.model_config import ModelConfig
from normlab.nn import Attention, Decoder, FeedForward, Placement

SIZES: Final = (
    *("dim", "ffn_dim", "heads", "kv_heads", "head_dim", "encoder_layers", "decoder_layers", "max_positions"),
    *("rope_theta", "base_dim", "base_layers", "logit_cap", "qk_norm_len"),
)
SLIDING: Final = ("sliding_window", "layer_pattern", "sliding_rope_theta")
WEIGHTS_ALONE: Final = (
    *("scheme", "dropout", "attention_dropout", "ffn_dropout", "embedding", "embedding_scale"),
    *("encoder_placement", "separate_source", "residual_warmup_steps"),
)
"""Parts whose choice changes only the weights or the training: the exported model is the same."""
RMS: Final = ("rmsnorm", "rmsnorm1p", "rmsnorm_nogain")
GATED: Final = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
TABLES: Final = ("model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight")
"""Weights with a row for each entry of the vocabulary."""
Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Family:
    """A Hugging Face class: the parts that it has, its configuration, and its weights by name."""

    kind: str
    """Its ``model_type``."""
    parts: Mapping[str, Sequence[str]]
    """For each part of a model that the family restricts, the names that it allows, the usual one first."""
    configuration: Callable[[ModelConfig, Decoder], Mapping[str, Any]]
    """The part of its configuration that is not common to all families."""
    weights: Callable[[Decoder, int], Weights]
    """Return its weights, given the model and the number of positions."""
    has_kv_heads: bool = True
    slides: bool = False
    """Whether its layers may have sliding windows."""

    def misfits(self, config: ModelConfig) -> list[str]:
        """Return why a model does not fit, one reason for each part; empty if it fits."""
        config = Placement.registry[config.decoder_placement].complete(config)
        free = (*SIZES, *WEIGHTS_ALONE, *(SLIDING if self.slides else ()))
        reasons = []
        for declared in fields(config):
            name, value = declared.name, getattr(config, declared.name)
            without_part = declared.metadata.get("introduced", declared.default)
            allowed = tuple(self.parts.get(name, (without_part,)))
            if name not in free and value not in allowed:
                reasons.append(f"{name} is {value}, and {self.kind} has {' or '.join(map(str, allowed))}")
        if not self.has_kv_heads and config.kv_heads not in (0, config.heads):
            reasons.append(f"kv_heads is {config.kv_heads}, and {self.kind} has as many as heads")
        return reasons


class _Layer(NamedTuple):
    """A layer of a decoder: its two branches, and the placement of each."""

    attention: Attention
    attention_place: Any
    ffn: FeedForward
    ffn_place: Any


def _layers_of(model: Decoder) -> list[_Layer]:
    sublayers = list(model.decoder)
    layers = []
    for first, second in zip(sublayers[::2], sublayers[1::2], strict=True):
        attention, ffn = cast("Attention", first.f), cast("FeedForward", second.f)
        layers.append(_Layer(attention, first.place, ffn, second.place))
    return layers


def _embeddings(model: Decoder, built_in_factor: float = 1.0) -> Tensor:
    """The vectors that enter the first layer, without positions, `[V, D]`, for a family that multiplies them
    by ``built_in_factor`` itself.
    """
    # The quotient is often exactly 1, and then nothing is rounded.
    return model.embedding.vectors() * (model.embedding.scale / built_in_factor)


def _output_matrix(model: Decoder) -> Tensor:
    """The matrix that makes logits of the last hidden states, `[V, D]`: the logits of the unit vectors."""
    dim = model.embedding.weight.shape[1]
    return model.embedding.logits(torch.eye(dim, dtype=model.embedding.weight.dtype)).T


def _gain(norm: Any) -> Tensor:
    """The gain of an RMSNorm of any kind, `[D]`."""
    plain = norm.fold() if hasattr(norm, "fold") else norm
    # Some kinds fold in float64, and one has no parameter at all.
    trained = next(iter(norm.parameters()), plain.weight)
    return plain.weight.to(trained.dtype)


def _halved(rows: Tensor, width: int) -> Tensor:
    """Rows `[heads x width, …]` of queries or keys, reordered so that the first rows of all rope planes come
    before the second ones: Hugging Face rotates (i, i + width/2), normlab (2i, 2i + 1).
    """
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def _linear(name: str, weight: Tensor, bias: Tensor | None) -> Weights:
    """A linear map under its name, with a bias if it has one."""
    weights = {f"{name}.weight": weight}
    if bias is not None:
        weights[f"{name}.bias"] = bias
    return weights


# --------------------------------------------------------------------------------------------------- families
def _gpt2_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    end: Any = model.decoder.end
    names = {"gelu_tanh": "gelu_new"}
    return {
        "n_inner": config.ffn_dim,
        "activation_function": names.get(config.activation, config.activation),
        "layer_norm_epsilon": end.eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _gpt2_weights(model: Decoder, positions: int) -> Weights:
    """GPT-2's weights: its matrices are transposed, and its biases 0 where the model has none."""
    output = _output_matrix(model)
    # What the position encoding adds to embeddings of 0 is the table of positions.
    blank = output.new_zeros(1, positions, output.shape[1])
    weights = {
        "transformer.wte.weight": _embeddings(model),
        "transformer.wpe.weight": model.position_encoding(blank)[0],
        "lm_head.weight": output,
    }
    for i, layer in enumerate(_layers_of(model)):
        prefix = f"transformer.h.{i}."
        for name, norm in (("ln_1", layer.attention_place.norm), ("ln_2", layer.ffn_place.norm)):
            weights |= {f"{prefix}{name}.weight": norm.weight, f"{prefix}{name}.bias": norm.bias}
        maps = {
            "attn.c_attn": layer.attention.qkv,
            "attn.c_proj": layer.attention.out,
            "mlp.c_fc": layer.ffn.inner,
            "mlp.c_proj": layer.ffn.outer,
        }
        for name, linear in maps.items():
            bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
            weights |= _linear(prefix + name, linear.weight.T, bias)
    end: Any = model.decoder.end
    return weights | _linear("transformer.ln_f", end.weight, end.bias)


def _llama_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    end: Any = model.decoder.end
    first = _layers_of(model)[0].attention
    biased = first.out.bias is not None
    return {
        "intermediate_size": config.ffn_dim,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.width,
        "hidden_act": GATED[config.activation],
        "rms_norm_eps": end.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": biased,
        **({"mlp_bias": True} if biased else {}),
    }


def _rotary_weights(
    model: Decoder,
    positions: int,
    *,
    norms: Sequence[str],
    built_in_factor: float = 1.0,
    built_in_gain: float = 0.0,
) -> Weights:
    """The weights that Llama and its descendants share; ``norms`` are the names of a layer's norms in order.

    A family may multiply the embeddings by ``built_in_factor`` itself, and add ``built_in_gain`` to the gains
    of norms; both are taken out of the weights.
    """
    weights = {
        "model.embed_tokens.weight": _embeddings(model, built_in_factor),
        "lm_head.weight": _output_matrix(model),
    }
    for i, layer in enumerate(_layers_of(model)):
        prefix = f"model.layers.{i}."
        modules = (*layer.attention_place.children(), *layer.ffn_place.children())
        for name, norm in zip(norms, modules, strict=True):
            weights[f"{prefix}{name}.weight"] = _gain(norm) - built_in_gain
        weights |= _rotary_attention(f"{prefix}self_attn.", layer.attention, built_in_gain)
        weights |= _gated_ffn(f"{prefix}mlp.", layer.ffn)
    weights["model.norm.weight"] = _gain(model.decoder.end) - built_in_gain
    return weights


def _rotary_attention(prefix: str, attention: Attention, built_in_gain: float) -> Weights:
    """The weights of an attention; rope rotates queries and keys, so their rows change order."""
    matrices = attention.matrices()
    rows = [matrices[name] for name in ("query", "key", "value")]
    biases: Sequence[Tensor | None] = (None, None, None)
    if attention.qkv.bias is not None:
        sizes = [len(matrix) for matrix in rows]
        biases = attention.qkv.bias[: sum(sizes)].split(sizes)  # those of gates come after these
    weights: Weights = {}
    for letter, matrix, bias in zip("qkv", rows, biases, strict=True):
        if letter != "v":
            matrix = _halved(matrix, attention.width)
            bias = None if bias is None else _halved(bias, attention.width)
        weights |= _linear(f"{prefix}{letter}_proj", matrix, bias)
    for letter, norm in zip("qk", attention.qk_norm.children(), strict=False):  # not every model has them
        weights[f"{prefix}{letter}_norm.weight"] = _halved(_gain(norm), attention.width) - built_in_gain
    return weights | _linear(f"{prefix}o_proj", attention.out.weight, attention.out.bias)


def _gated_ffn(prefix: str, ffn: FeedForward) -> Weights:
    """The weights of a gated feed-forward, whose inner map packs values above gates."""
    up, gate = ffn.inner.weight.chunk(2)
    up_bias, gate_bias = (None, None) if ffn.inner.bias is None else ffn.inner.bias.chunk(2)
    return {
        **_linear(f"{prefix}up_proj", up, up_bias),
        **_linear(f"{prefix}gate_proj", gate, gate_bias),
        **_linear(f"{prefix}down_proj", ffn.outer.weight, ffn.outer.bias),
    }


NORMS: Final = ("input_layernorm", "post_attention_layernorm")
GEMMA3_NORMS: Final = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO2_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")


def _gemma3_weights(model: Decoder, positions: int) -> Weights:
    """The weights of Gemma 3, which multiplies embeddings by the root of the width and adds 1 to gains."""
    factor = model.embedding.weight.shape[1] ** 0.5
    return _rotary_weights(model, positions, norms=GEMMA3_NORMS, built_in_factor=factor, built_in_gain=1.0)


def _gemma3_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    slides = [bool(config.sliding_window) and config.slides(i) for i in range(config.decoder_layers)]
    shared = dict(_llama_configuration(config, model))
    activation = shared.pop("hidden_act")
    rope = shared.pop("rope_parameters")
    sliding_rope = {**rope, "rope_theta": config.sliding_rope_theta or config.rope_theta}
    return {
        **shared,
        "hidden_activation": activation,
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding_rope},
        "query_pre_attn_scalar": config.head_width,
        "sliding_window": config.sliding_window or None,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
    }


ROTARY: Final[dict[str, Sequence[str]]] = {
    "decoder_placement": ("pre",),
    "norm": RMS,
    "position_encoding": ("rope",),
    "activation": tuple(GATED),
    "qk_norm": ("scaled",),
    "bias": ("nobias",),
    "inner_norm": ("noinnernorm",),
    "head_gain": ("noheadgain",),
}
FAMILIES: Final = (
    Family(
        "gpt2",
        {
            **ROTARY,
            "norm": ("layernorm",),
            "position_encoding": ("learned", "sinusoidal"),
            "activation": ("gelu_tanh", "gelu", "relu", "relu2"),
            "bias": ("bias", "nobias"),
        },
        _gpt2_configuration,
        _gpt2_weights,
        has_kv_heads=False,
    ),
    Family(
        "llama",
        {**ROTARY, "bias": ("nobias", "bias")},
        _llama_configuration,
        partial(_rotary_weights, norms=NORMS),
    ),
    Family(
        "qwen3",
        {**ROTARY, "qk_norm": ("headnormed",)},
        _llama_configuration,
        partial(_rotary_weights, norms=NORMS),
    ),
    Family(
        "gemma3_text",
        {**ROTARY, "decoder_placement": ("sandwich",), "qk_norm": ("headnormed",)},
        _gemma3_configuration,
        _gemma3_weights,
        slides=True,
    ),
    Family(
        "olmo2",
        {**ROTARY, "decoder_placement": ("olmo2",), "qk_norm": ("normed",)},
        _llama_configuration,
        partial(_rotary_weights, norms=OLMO2_NORMS),
    ),
)
