"""Hugging Face classes as families: which parts each has, and a decoder's weights under its names.

A recipe fits a family that has each of its parts. What the weights mean is read from the modules, not from
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

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
        reasons = []
        for declared in fields(config):
            name, value = declared.name, getattr(config, declared.name)
            usual = (declared.metadata.get("introduced", declared.default),)
            allowed = tuple(self.parts.get(name, usual))
            free = (*SIZES, *WEIGHTS_ALONE, *(SLIDING if self.slides else ()))
            if name not in free and value not in allowed:
                reasons.append(f"{name} is {value}, and {self.kind} has {' or '.join(map(str, allowed))}")
        if not self.has_kv_heads and config.kv_heads not in (0, config.heads):
            reasons.append(f"kv_heads is {config.kv_heads}, and {self.kind} has as many as heads")
        return reasons


def _layers_of(model: Decoder) -> list[tuple[Any, Attention, Any, FeedForward]]:
    """Placement and branch of the attention and of the feed-forward of every layer."""
    every = list(model.decoder)
    pairs = zip(every[::2], every[1::2], strict=True)
    return [(a.place, cast("Attention", a.f), b.place, cast("FeedForward", b.f)) for a, b in pairs]


def _tables(model: Decoder, own_factor: float = 1.0) -> Weights:
    """The tables at the input and at the output, `[V, D]`, for a family that multiplies the embeddings by
    ``own_factor`` itself.
    """
    embedding = model.embedding
    unit = torch.eye(embedding.weight.shape[1], dtype=embedding.weight.dtype)
    given = embedding.vectors() * (embedding.scale / own_factor)
    return {"input": given, "lm_head.weight": embedding.logits(unit).T}


def _gain(norm: nn.Module) -> Tensor:
    """The gain of an RMSNorm of any kind, `[D]`."""
    own: Any = norm
    plain = own.fold() if hasattr(own, "fold") else own
    return plain.weight.to(next(iter(own.parameters()), plain.weight).dtype)


def _halved(rows: Tensor, width: int) -> Tensor:
    """Rows `[heads x width, …]` of queries or keys, reordered so that the first rows of all rope planes come
    before the second ones: Hugging Face rotates (i, i + width/2), normlab (2i, 2i + 1).
    """
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


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
    own = _tables(model)
    own["transformer.wte.weight"] = own.pop("input")
    blank = own["lm_head.weight"].new_zeros(1, positions, own["lm_head.weight"].shape[1])
    own["transformer.wpe.weight"] = model.position_encoding(blank)[0]
    for i, (before, attention, between, ffn) in enumerate(_layers_of(model)):
        at = f"transformer.h.{i}."
        for name, norm in (("ln_1", before.norm), ("ln_2", between.norm)):
            own |= {f"{at}{name}.weight": norm.weight, f"{at}{name}.bias": norm.bias}
        maps = {"attn.c_attn": attention.qkv, "attn.c_proj": attention.out}
        maps |= {"mlp.c_fc": ffn.inner, "mlp.c_proj": ffn.outer}
        for name, linear in maps.items():
            bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
            own |= {f"{at}{name}.weight": linear.weight.T, f"{at}{name}.bias": bias}
    end: Any = model.decoder.end
    return own | {"transformer.ln_f.weight": end.weight, "transformer.ln_f.bias": end.bias}


def _llama_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    end: Any = model.decoder.end
    _, first, _, _ = _layers_of(model)[0]
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
    model: Decoder, positions: int, *, norms: Sequence[str], own_factor: float = 1.0, own_gain: float = 0.0
) -> Weights:
    """The weights that Llama and its descendants share; ``norms`` are the names of a layer's norms in order.

    A family may multiply the embeddings by ``own_factor`` itself, and add ``own_gain`` to the gains of norms.
    """
    own = _tables(model, own_factor)
    own["model.embed_tokens.weight"] = own.pop("input")
    for i, (before, attention, between, ffn) in enumerate(_layers_of(model)):
        at, width = f"model.layers.{i}.", attention.width
        places = (*before.children(), *between.children())
        own |= {f"{at}{n}.weight": _gain(norm) - own_gain for n, norm in zip(norms, places, strict=True)}
        matrices = attention.matrices()
        packed: dict[str, Sequence[Tensor]] = {"weight": [matrices[m] for m in ("query", "key", "value")]}
        if (bias := attention.qkv.bias) is not None:
            sizes = [*map(len, packed["weight"])]
            packed["bias"] = bias[: sum(sizes)].split(sizes)
        for name, rows in packed.items():
            for letter, row in zip("qkv", rows, strict=True):
                own[f"{at}self_attn.{letter}_proj.{name}"] = row if letter == "v" else _halved(row, width)
        for letter, norm in zip("qk", attention.qk_norm.children(), strict=False):
            own[f"{at}self_attn.{letter}_norm.weight"] = _halved(_gain(norm), width) - own_gain
        maps = {"self_attn.o_proj": (attention.out.weight, attention.out.bias)}
        maps["mlp.down_proj"] = ffn.outer.weight, ffn.outer.bias
        up, gate = ffn.inner.weight.chunk(2)
        biased = (None, None) if ffn.inner.bias is None else ffn.inner.bias.chunk(2)
        maps |= {"mlp.up_proj": (up, biased[0]), "mlp.gate_proj": (gate, biased[1])}
        for name, (matrix, bias) in maps.items():
            own[f"{at}{name}.weight"] = matrix
            own |= {} if bias is None else {f"{at}{name}.bias": bias}
    return own | {"model.norm.weight": _gain(model.decoder.end) - own_gain}


NORMS: Final = ("input_layernorm", "post_attention_layernorm")
GEMMA3_NORMS: Final = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO2_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")


def _gemma3_weights(model: Decoder, positions: int) -> Weights:
    """The weights of Gemma 3, which multiplies embeddings by the root of the width and adds 1 to gains."""
    factor = model.embedding.weight.shape[1] ** 0.5
    return _rotary_weights(model, positions, norms=GEMMA3_NORMS, own_factor=factor, own_gain=1.0)


def _gemma3_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    slides = [bool(config.sliding_window) and config.slides(i) for i in range(config.decoder_layers)]
    shared = dict(_llama_configuration(config, model))
    activation, rope = shared.pop("hidden_act"), shared.pop("rope_parameters")
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
