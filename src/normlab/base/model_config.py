"""The description of a model, from which ``normlab.nn`` builds it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from normlab.base.io import Amount, Count, Positive, Share, Size, no_flag, validated
from normlab.errors import UserError


@validated
@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of a Transformer; a recipe chooses the parts."""

    dim: Size = 256
    """Width of the residual stream."""
    ffn_dim: Size = 1024
    """Inner width of the feed-forward branches."""
    heads: Size = 4
    """Attention heads."""
    encoder_layers: Count = 3
    """Layers of the encoder; 0 for a model without one."""
    decoder_layers: Count = 3
    """Layers of the decoder; 0 for a model without one."""
    encoder_placement: str = no_flag("post")
    decoder_placement: str = no_flag("post")
    norm: str = no_flag("layernorm")
    embedding: str = no_flag("plain")
    scheme: str = no_flag("xavier")
    dropout: Share = 0.1
    """Dropout on the embeddings and on the output of every branch."""
    attention_dropout: Share = no_flag(0.0)
    """Dropout on the attention weights."""
    ffn_dropout: Share = no_flag(0.0)
    """Dropout after the activation of the feed-forward branches."""
    kv_heads: Count = 0
    """Heads of keys and values, each shared by several heads of queries; 0: as many as heads."""
    position_encoding: str = no_flag("sinusoidal")
    max_positions: Size = 1024
    """Number of positions that learned position encodings have; no input may be longer."""
    separate_source: bool = no_flag(False)
    """Whether an encoder next to a decoder has its own embeddings and positions, with a shared vocabulary."""
    embedding_norm: bool = no_flag(False)
    """Normalise the sum of the embeddings, as BERT does."""
    activation: str = no_flag("relu")
    qk_norm: str = no_flag("")
    """An empty name, here and in the next three, leaves the choice to the placement of each stack."""
    bias: str = no_flag("")
    inner_norm: str = no_flag("")
    head_gain: str = no_flag("")
    attention_gate: str = no_flag("ungated")
    value_residual: str = no_flag("novalueresidual")
    embedding_scale: str = no_flag("embedscale")
    logit_map: str = no_flag("rawlogits")
    weight_constraint: str = no_flag("freeweights")
    logit_cap: Positive = 15.0
    """Largest absolute logit c of recipes with softcap, c tanh(z/c): nanochat has 15, Gemma 2 30."""
    head_dim: Count = 0
    """Width of an attention head; 0: the width of the stream divided by the number of heads."""
    rope_theta: Positive = 10000.0
    """Base of the wavelengths of rope: Llama 2 has 1e4, Llama 3 and OLMo 2 5e5, Gemma 3 1e6."""
    sliding_window: Count = 0
    """Positions, including its own, that a token attends to in a sliding layer of a decoder; 0: all."""
    layer_pattern: str = "S"
    """S for a sliding layer and F for a full one, repeated over the layers."""
    sliding_rope_theta: Amount = no_flag(0.0)
    """Base of the wavelengths of rope in sliding layers; 0: as in the others."""
    residual_warmup_steps: Size = 1000
    """Steps T in which prores opens the first layer's branches; layer l takes l times as many."""
    parametrisation: str = no_flag("standard")
    """How starts, rates, decay and multipliers scale with width and depth."""
    base_dim: Count = 0
    """Width at which a parametrisation such as mup changes nothing; 0: the model's own."""
    base_layers: Count = 0
    """Layers of a stack at which a parametrisation changes nothing; 0: the model's own."""
    qk_norm_len: Annotated[int, Ge(2), Lt(2**63)] = 64
    """97.5th percentile of the training sentences' lengths in tokens, which sets qknorm's initial scale."""

    def __post_init__(self) -> None:
        if not self.layer_pattern or set(self.layer_pattern) > {"S", "F"}:
            raise UserError(
                f"layer_pattern is {self.layer_pattern!r}, but must consist of S for sliding and F for full "
                "layers, such as SSSSSF"
            )

    def slides(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a sliding one."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "S"

    @property
    def head_width(self) -> int:
        """The width of an attention head."""
        return self.head_dim or self.dim // self.heads

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has an encoder and a decoder with different placements."""
        both = bool(self.encoder_layers and self.decoder_layers)
        return both and self.encoder_placement != self.decoder_placement


def derive(seed: int, purpose: str, *counters: int) -> int:
    """Return a seed in [0, 2**63): the first 63 bits of BLAKE2b over the arguments.

    Different purposes or counters (step, micro-batch, epoch) give unrelated seeds; the same ones give the
    same seed on every machine and Python version.
    """
    key = "\x1f".join([purpose, str(int(seed)), *(str(int(counter)) for counter in counters)])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
