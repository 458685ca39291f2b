"""Other libraries' decoders of one of our sizes, each from token ids `[B, T]` to logits `[B, T, V]`.

All have one shape: Pre-LN, biases, GELU in its tanh form, learned positions and one tied table, as GPT-2 has
them, or RMSNorm, rope, SwiGLU, no biases and an output matrix of its own, as Llama has. Nothing is dropped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.lab.config import Config
from normlab.lab.training.export import family_of, hugging_face
from normlab.nn import Decoder


class NanoGPT(nn.Module):
    """What nanoGPT's model computes: torch's Linear, packed queries, keys and values, fused attention.

    Written anew from the equations of Radford et al. 2019; with biases, which nanoGPT has as an option.
    """

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(rows, config.dim) for rows in (vocab, config.max_positions))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.decoder_layers))
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """A layer: attention and feed-forward, each behind its norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, config.ffn_dim), nn.Linear(config.ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in split)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class HuggingFace(nn.Module):
    """The class of transformers that the model fits, its attention as it comes, with our model's weights."""

    def __init__(self, config: Config, model: Decoder) -> None:
        super().__init__()
        rows = torch.arange(len(model.embedding.weight))
        self.model = hugging_face(family_of(config), config, model, rows)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


LLAMA: dict[str, Any] = {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True, "ff_no_bias": True}
"""x-transformers' names for what Llama has, rope aside."""


def x_transformers(shape: str, config: ModelConfig, vocab: int) -> nn.Module:
    """Its decoder with fused attention; as GPT-2 it has no biases in attention, and exact GELU."""
    from x_transformers import Decoder as Layers
    from x_transformers import TransformerWrapper

    head_dim, llama = config.dim // config.heads, shape == "Llama"
    rope = {"rotary_pos_emb": True, "rotary_emb_dim": head_dim}
    layers: Any = Layers(
        dim=config.dim,
        depth=config.decoder_layers,
        heads=config.heads,
        attn_dim_head=head_dim,
        attn_flash=True,
        ff_mult=config.ffn_dim / config.dim,
        **(LLAMA | rope if llama else {}),
    )
    return TransformerWrapper(
        num_tokens=vocab,
        max_seq_len=config.max_positions,
        use_abs_pos_emb=not llama,
        tie_embedding=not llama,
        attn_layers=layers,
    )


def peers(shape: str, config: Config, model: Decoder) -> dict[str, Callable[[], nn.Module]]:
    """The peers of a shape that are installed, by name."""
    vocab = len(model.embedding.weight)
    found: dict[str, tuple[str, Callable[[], nn.Module]]] = {
        f"Hugging Face's {shape}": ("transformers", lambda: HuggingFace(config, model)),
        "x-transformers": ("x_transformers", lambda: x_transformers(shape, config.model, vocab)),
    }
    if shape == "GPT-2":
        found["nanoGPT-like"] = "torch", lambda: NanoGPT(config.model, vocab)
    return {name: make for name, (package, make) in found.items() if importlib.util.find_spec(package)}


def products(config: ModelConfig, vocab: int, rows: int) -> list[tuple[int, int, int]]:
    """Rows, inputs and outputs of each linear map of a forward pass, the logits included."""
    gated = 2 if config.activation == "swiglu" else 1
    layer = [
        (rows, config.dim, 3 * config.dim),
        (rows, config.dim, config.dim),
        (rows, config.dim, gated * config.ffn_dim),
        (rows, config.ffn_dim, config.dim),
    ]
    return [*(layer * config.decoder_layers), (rows, config.dim, vocab)]


def products_alone(config: ModelConfig, vocab: int, rows: int, dtype: torch.dtype) -> Callable[[], object]:
    """What does the matrix products of a step, three for each linear map, and nothing else."""
    shapes = products(config, vocab, rows)
    kept = {
        (m, k, n): (torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(m, n).to(dtype))
        for m, k, n in set(shapes)
    }

    def all_products() -> None:
        for shape in shapes:
            x, weight, grad = kept[shape]
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return all_products
