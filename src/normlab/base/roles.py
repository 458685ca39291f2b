"""What a parameter is for, in the words by which optimizers, checks and scaling laws sort parameters.

The classes of normlab's own models declare these roles (``nn.roles``); those of any other model are read off
a step (``trace.facts``). Two other ideas have words of their own. Which matrix of its layer a parameter is
(query, ffn_in, …) is its *kind*, as in ``trace.starts.ParameterPart``. What a sublayer does (self_attention,
ffn, …) is the role of the sublayer, as in ``nn.site`` and ``diagnosis.structure``.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Role: TypeAlias = Literal["embedding", "head", "hidden", "norm", "bias", "scalar", "token"]
ROLES: Final[tuple[Role, ...]] = ("embedding", "head", "hidden", "norm", "bias", "scalar")
"""Tables of tokens and positions, output matrices, all other matrices, parameters of norms, biases, and what
else a placement or a branch trains: gains of branches, of heads, of shortcuts. These a class may declare. A
``token`` joins the stream as it is, like a class token or a prompt, which only a step shows.
"""
MATRICES: Final[tuple[Role, ...]] = ("hidden", "embedding", "head")
VECTORS: Final[tuple[Role, ...]] = ("norm", "bias", "scalar")

MATRIX_KINDS: Final = ("query", "key", "value", "output", "ffn_in", "ffn_out")
"""The matrices of an attention and of a feed-forward, whatever they are called in a model. ``nn`` has a list
of its own, with gates, in the order in which it draws them: ``nn.sublayer.MATRICES``.
"""
