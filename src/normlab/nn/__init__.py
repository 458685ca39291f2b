"""Transformers from placements, norms and branches; every variant is in the registry of its base class.

Pure torch: it imports only ``base``, ``errors`` and ``private_torch``. ``optim``, ``lab`` and ``papers``
import it, and of the instruments ``scaling``, in one module.
"""

from normlab.base.roles import ROLES
from normlab.nn.context import Cache, Context
from normlab.nn.embedding import (
    EMBEDDING_SCALES,
    Embedding,
    FixNormEmbedding,
    LogitMap,
    PlainEmbedding,
    UntiedEmbedding,
)
from normlab.nn.kernels.ops import Dropout, reference
from normlab.nn.model import (
    PAD,
    Decoder,
    Encoder,
    PairClassifier,
    SegmentEncoder,
    Seq2Seq,
    TokenModel,
    WeightConstraint,
    after_step,
)
from normlab.nn.norm import DyT, LayerNorm, Norm, RMSNorm, ScaleNorm
from normlab.nn.options import BIASES, GATES, HEAD_GAINS, INNER_NORMS, Activation, ReLU, ValueResidual
from normlab.nn.parametrisation import Parametrisation
from normlab.nn.placement.base import Placement, Plain, ProfiledPlacement
from normlab.nn.placement.normed import MixNorm, PostNorm, PreNorm
from normlab.nn.placement.scaled import Admin, DeepNorm, LayerScale
from normlab.nn.placement.streamed import SiameseNorm
from normlab.nn.position import PositionEncoding
from normlab.nn.query_key import QueryKeyNorm
from normlab.nn.roles import ParameterRole, parameter_roles
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER, LANGUAGE_LAYER, Site, sites, stack_of
from normlab.nn.sublayer import Attention, Branch, FeedForward, Stack, Sublayer, build_stack, shards, wrap

__all__ = [
    "BIASES",
    "DECODER_LAYER",
    "EMBEDDING_SCALES",
    "ENCODER_LAYER",
    "GATES",
    "HEAD_GAINS",
    "INNER_NORMS",
    "LANGUAGE_LAYER",
    "PAD",
    "ROLES",
    "Activation",
    "Admin",
    "Attention",
    "Branch",
    "Cache",
    "Context",
    "Decoder",
    "DeepNorm",
    "Dropout",
    "DyT",
    "Embedding",
    "Encoder",
    "FeedForward",
    "FixNormEmbedding",
    "LayerNorm",
    "LayerScale",
    "LogitMap",
    "MixNorm",
    "Norm",
    "PairClassifier",
    "ParameterRole",
    "Parametrisation",
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
    "ScaleNorm",
    "SegmentEncoder",
    "Seq2Seq",
    "SiameseNorm",
    "Site",
    "Stack",
    "Sublayer",
    "TokenModel",
    "UntiedEmbedding",
    "ValueResidual",
    "WeightConstraint",
    "after_step",
    "build_stack",
    "parameter_roles",
    "reference",
    "shards",
    "sites",
    "stack_of",
    "wrap",
]
