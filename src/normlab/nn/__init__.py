"""Transformers from placements, norms and branches.

Pure torch: of this package it imports only ``spec.model``, the description of a model, and ``errors``.
"""

from normlab.nn.context import Cache, Context
from normlab.nn.embedding import Embedding, FixNormEmbedding, PlainEmbedding, UntiedEmbedding
from normlab.nn.kernels.ops import Dropout, reference
from normlab.nn.model import PAD, Decoder, Encoder, PairClassifier, SegmentEncoder, Seq2Seq, TokenModel
from normlab.nn.norm import Derf, DyT, FixedScaleNorm, LayerNorm, Norm, RMSNorm, ScaleNorm
from normlab.nn.options import BIASES, HEAD_GAINS, INNER_NORMS, Activation, QueryKeyNorm, ReLU
from normlab.nn.placement.base import Placement, Plain, ProfiledPlacement
from normlab.nn.placement.normed import (
    B2T,
    B2TAsCoded,
    Keel,
    LayerNormScaling,
    MixNorm,
    NormFormer,
    OLMo2Norm,
    PeriNorm,
    PostNorm,
    PreNorm,
    ResiDual,
    SandwichNorm,
    SubNorm,
)
from normlab.nn.placement.scaled import (
    Admin,
    AdminAsCoded,
    AdminDataFree,
    AdminRescaled,
    DeepNorm,
    FixUp,
    LayerScale,
    ReZero,
    ReZeroPostNorm,
    SkipInit,
    TFixup,
)
from normlab.nn.position import PositionEncoding
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER, LANGUAGE_LAYER, Site, sites, stack_of
from normlab.nn.stack import Stack, build_stack, shards
from normlab.nn.sublayer import Attention, Branch, FeedForward, Sublayer, wrap

__all__ = [
    "B2T",
    "BIASES",
    "DECODER_LAYER",
    "ENCODER_LAYER",
    "HEAD_GAINS",
    "INNER_NORMS",
    "LANGUAGE_LAYER",
    "PAD",
    "Activation",
    "Admin",
    "AdminAsCoded",
    "AdminDataFree",
    "AdminRescaled",
    "Attention",
    "B2TAsCoded",
    "Branch",
    "Cache",
    "Context",
    "Decoder",
    "DeepNorm",
    "Derf",
    "Dropout",
    "DyT",
    "Embedding",
    "Encoder",
    "FeedForward",
    "FixNormEmbedding",
    "FixUp",
    "FixedScaleNorm",
    "Keel",
    "LayerNorm",
    "LayerNormScaling",
    "LayerScale",
    "MixNorm",
    "Norm",
    "NormFormer",
    "OLMo2Norm",
    "PairClassifier",
    "PeriNorm",
    "Placement",
    "Plain",
    "PlainEmbedding",
    "PositionEncoding",
    "PostNorm",
    "PreNorm",
    "ProfiledPlacement",
    "QueryKeyNorm",
    "RMSNorm",
    "ReLU",
    "ReZero",
    "ReZeroPostNorm",
    "ResiDual",
    "SandwichNorm",
    "ScaleNorm",
    "SegmentEncoder",
    "Seq2Seq",
    "Site",
    "SkipInit",
    "Stack",
    "SubNorm",
    "Sublayer",
    "TFixup",
    "TokenModel",
    "UntiedEmbedding",
    "build_stack",
    "reference",
    "shards",
    "sites",
    "stack_of",
    "wrap",
]
