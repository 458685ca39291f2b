"""Other libraries' encoder-decoders of one of our sizes, each from token ids to logits.

All have one embedding tied three ways, sinusoidal positions and ReLU, and drop embeddings, attention weights,
the activation and every branch's output; all draw their dropout masks element by element. torch.nn has our
embedding and positions; Marian has Post-LN only; x-transformers has no biases in attention, and norms of its
own where a stack ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.nn import PAD, Embedding, Seq2Seq
from normlab.nn.position import sinusoids

LONGEST = 256
"""Positions of every model."""


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder between our embedding and positions; no final norms for Post-LN."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.embedding = Embedding.registry[config.embedding](vocab, config.dim)
        self.embedding.init_(torch.Generator().manual_seed(1))
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(LONGEST, config.dim), persistent=False)
        self.positions: Tensor
        first = config.encoder_placement == "pre"
        layer = {
            "d_model": config.dim,
            "nhead": config.heads,
            "dim_feedforward": config.ffn_dim,
            "dropout": config.dropout,
            "batch_first": True,
            "norm_first": first,
        }
        norms = [nn.LayerNorm(config.dim) if first else None for _ in range(2)]
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer), config.encoder_layers, norms[0], enable_nested_tensor=False
        )
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), config.decoder_layers, norms[1])
        self.transformer = nn.Transformer(
            config.dim, config.heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
        )
        self.causal: dict[int, Tensor] = {}

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[B, T, V]`; the additive causal matrix is made once a length and kept."""
        length = target.shape[1]
        if length not in self.causal:
            self.causal[length] = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        padding = source == PAD
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=self.causal[length],
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.embedding.logits(hidden)


class Marian(nn.Module):
    """Hugging Face's Marian, its attention as it comes."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.model = marian(config, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(
            source, attention_mask=(source != PAD).long(), decoder_input_ids=target, use_cache=False
        ).logits


def marian(config: ModelConfig, vocab: int) -> nn.Module:
    """``MarianMTModel`` with random weights; BOS is 2 and EOS is 3."""
    from transformers import MarianConfig, MarianMTModel

    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for name, value in (
            ("layers", layers),
            ("attention_heads", config.heads),
            ("ffn_dim", config.ffn_dim),
        )
    }
    shape = MarianConfig(
        **sides,
        vocab_size=vocab,
        d_model=config.dim,
        max_position_embeddings=LONGEST,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        activation_dropout=config.ffn_dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return MarianMTModel(shape)


@torch.no_grad()
def like_marian(model: nn.Module, config: ModelConfig, vocab: int) -> Seq2Seq:
    """Our Post-LN model with the weights of a ``MarianMTModel``."""
    ours, theirs = Seq2Seq(config, vocab).eval(), model.model
    ours.embedding.weight.copy_(theirs.shared.weight)
    ours.position_encoding.table = theirs.encoder.embed_positions.weight.detach().clone()
    for stack, other in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        sublayers = iter(stack.sublayers)
        for layer in other.layers:
            _copy_attention(next(sublayers), layer.self_attn, layer.self_attn_layer_norm)
            if hasattr(layer, "encoder_attn"):
                _copy_attention(next(sublayers), layer.encoder_attn, layer.encoder_attn_layer_norm)
            feed_forward = next(sublayers)
            feed_forward.f.inner.load_state_dict(layer.fc1.state_dict())
            feed_forward.f.outer.load_state_dict(layer.fc2.state_dict())
            feed_forward.place.norm.load_state_dict(layer.final_layer_norm.state_dict())
    return ours


def _copy_attention(sublayer: nn.Module, theirs: nn.Module, norm: nn.Module) -> None:
    parts = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    packed = [(sublayer.f.qkv, parts)] if hasattr(sublayer.f, "qkv") else []
    packed = packed or [(sublayer.f.q, parts[:1]), (sublayer.f.kv, parts[1:])]
    for mine, several in packed:
        mine.weight.copy_(torch.cat([p.weight for p in several]))
        mine.bias.copy_(torch.cat([p.bias for p in several]))
    sublayer.f.out.load_state_dict(theirs.out_proj.state_dict())
    sublayer.place.norm.load_state_dict(norm.state_dict())


class XTransformers(nn.Module):
    """x-transformers with its fused attention."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = {
            "dim": config.dim,
            "heads": config.heads,
            "attn_dim_head": config.dim // config.heads,
            "attn_flash": True,
            "attn_dropout": config.attention_dropout,
            "attn_sublayer_dropout": config.dropout,
            "ff_mult": config.ffn_dim / config.dim,
            "ff_custom_activation": nn.ReLU(),
            "ff_dropout": config.ffn_dropout,
            "ff_sublayer_dropout": config.dropout,
            "pre_norm": config.encoder_placement == "pre",
        }
        around = {
            "num_tokens": vocab,
            "max_seq_len": LONGEST,
            "scaled_sinu_pos_emb": True,
            "emb_dropout": config.dropout,
        }
        self.encoder = TransformerWrapper(
            **around, return_only_embed=True, attn_layers=Encoder(depth=config.encoder_layers, **layers)
        )
        self.decoder = TransformerWrapper(
            **around,
            tie_embedding=True,
            attn_layers=Decoder(depth=config.decoder_layers, cross_attend=True, **layers),
        )
        self.decoder.token_emb = self.encoder.token_emb

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        real = source != PAD
        memory = self.encoder(source, mask=real, return_embeddings=True)
        return self.decoder(target, context=memory, context_mask=real)


class Joey(nn.Module):
    """JoeyNMT's encoder and decoder; its attention weights are dropped by the same rate as its outputs."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        from joeynmt.decoders import TransformerDecoder
        from joeynmt.embeddings import Embeddings
        from joeynmt.encoders import TransformerEncoder

        self.embedding = Embeddings(config.dim, scale=True, vocab_size=vocab, padding_idx=PAD)
        common = {
            "num_heads": config.heads,
            "hidden_size": config.dim,
            "ff_size": config.ffn_dim,
            "dropout": config.dropout,
            "emb_dropout": config.dropout,
            "layer_norm": config.encoder_placement,
        }
        self.encoder = TransformerEncoder(num_layers=config.encoder_layers, **common)
        self.decoder = TransformerDecoder(num_layers=config.decoder_layers, vocab_size=vocab, **common)
        self.decoder.output_layer.weight = self.embedding.lut.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        real = (source != PAD)[:, None]
        memory, _ = self.encoder(self.embedding(source), None, real)
        return self.decoder(
            trg_embed=self.embedding(target),
            encoder_output=memory,
            encoder_hidden=None,
            src_mask=real,
            unroll_steps=None,
            hidden=None,
            trg_mask=(target != PAD)[:, None],
        )[0]


PEERS: dict[str, tuple[str, Callable[[ModelConfig, int], nn.Module]]] = {
    "torch.nn": ("torch", TorchTransformer),
    "Marian": ("transformers", Marian),
    "x-transformers": ("x_transformers", XTransformers),
    "JoeyNMT": ("joeynmt", Joey),
}
"""Name to the package that it needs and its model."""


def installed(config: ModelConfig) -> list[str]:
    """The peers that are here and have this placement."""
    return [
        name
        for name, (package, _) in PEERS.items()
        if importlib.util.find_spec(package) and (name != "Marian" or config.encoder_placement == "post")
    ]
