"""Transformers from placements, norms and branches: pure torch, imports nothing else of ours."""

from .context import Cache, Context
from .embedding import Embedding, FixNormEmbedding, PlainEmbedding
from .model import PAD, Seq2Seq
from .norm import LayerNorm, Norm, RMSNorm, ScaleNorm
from .ops import Dropout, reference
from .placement import Admin, DeepNorm, Placement, PostNorm, PreNorm, ResiDual, ReZero, Site
from .stack import Stack, build_stack
from .sublayer import DECODER_LAYER, ENCODER_LAYER, Attention, Branch, FeedForward, Sublayer

__all__ = [
    "DECODER_LAYER",
    "ENCODER_LAYER",
    "PAD",
    "Admin",
    "Attention",
    "Branch",
    "Cache",
    "Context",
    "DeepNorm",
    "Dropout",
    "Embedding",
    "FeedForward",
    "FixNormEmbedding",
    "LayerNorm",
    "Norm",
    "Placement",
    "PlainEmbedding",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "ReZero",
    "ResiDual",
    "ScaleNorm",
    "Seq2Seq",
    "Site",
    "Stack",
    "Sublayer",
    "build_stack",
    "reference",
]
