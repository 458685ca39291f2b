"""Named baselines: published language models, with which a recipe can begin, as in ``like:llama``.

A baseline is a recipe and the fields that no part of a recipe sets. Sizes, lengths, the learning rate and the
number of warm-up steps stay those of the base configuration, because they depend on the model's size.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from normlab.base.registry import Registered, Registry
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.nn import Placement

LIKE = "like:"
"""The prefix of baselines' names, since some are also names of placements."""
ADAMW: Mapping[str, Any] = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "weight_decay_on": "matrices",
    "max_grad_norm": 1.0,
    "final_lr_factor": 0.1,
    "label_smoothing": 0.0,
}
"""How most language models are trained: AdamW, decay on matrices, clipping, a rate that ends at a tenth."""


PLAIN: Mapping[str, Any] = {"dropout": 0.0}
"""Fields that all baselines set."""


class NamedBaseline(Registered, ABC):
    """Base of all baselines; a subclass registers itself under ``like:`` and its name."""

    registry: ClassVar[Registry[type[NamedBaseline]]] = Registry("baseline")
    recipe: ClassVar[str]
    """Its parts, as a recipe."""
    task: ClassVar[str] = "language_model"
    """The task that it was published for."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Fields of ``ModelConfig`` besides the parts."""
    optim: ClassVar[Mapping[str, Any]] = ADAMW
    """Fields of ``OptimConfig`` besides the parts."""

    @classmethod
    def applied_to(cls, base: Config, kept: Collection[str] = ()) -> Config:
        """Return the base with the baseline's fields, except those in ``kept``, which the user has set."""

        def chosen(section: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in section.items() if name not in kept}

        model = replace(base.model, **chosen({**PLAIN, **cls.model}))
        return replace(base, model=model, optim=replace(base.optim, **chosen(cls.optim)))

    @classmethod
    def numbers(cls) -> str:
        """Name its fields with their values."""
        fields = {**PLAIN, **cls.model, **cls.optim}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())


def baseline_of(name: str) -> type[NamedBaseline] | None:
    """Return the baseline that a recipe begins with, if any: ``like:llama``, or ``llama`` if no placement has
    that name.
    """
    head, *_ = without_alias(name).split("+")
    if head.startswith(LIKE):
        return NamedBaseline.registry[head]
    full_name = LIKE + head
    if head in Placement.registry or full_name not in NamedBaseline.registry:
        return None
    return NamedBaseline.registry[full_name]


def alias_of(name: str) -> str:
    """Return the short name of a recipe, ``A`` of ``A=llama+qknorm``, or the recipe itself without one."""
    return name.partition("=")[0].strip()


def without_alias(name: str) -> str:
    """Return a recipe without its short name. Raises UserError for an invalid one."""
    alias, equals, recipe = name.partition("=")
    if not equals:
        return name
    if not re.fullmatch(r"[\w .:+-]{1,40}", alias) or "=" in recipe:
        raise UserError(
            f"recipe {name!r}: the short name before = has 1 to 40 letters, digits, blanks, or . : + -; "
            "type such as A=llama+qknorm"
        )
    return recipe.strip()


class GPT2(NamedBaseline, name="like:gpt2"):
    """GPT-2: Pre-LN with biases, learned positions, GELU in its tanh form, tied embeddings without a factor,
    AdamW and a cosine to a tenth.

    Radford et al. 2019 (Language Models are Unsupervised Multitask Learners) for the model, with the start of
    nanoGPT and of Hugging Face, after Brown et al. 2020, Section 2.1 (arXiv 2005.14165). Optimizer and
    schedule are those of nanoGPT at 3adf61e1, without dropout: rate 6e-4 at 124M parameters, 2,000 of 600,000
    steps of warm-up. nanoGPT trains without biases: ``like:gpt2+nobias``.
    """

    recipe = "pre+layernorm+plain+noembedscale+gpt2start+learned+gelu_tanh+bias+adamw+cosine+warmup"


class Llama(NamedBaseline, name="like:llama"):
    """Llama: Pre-LN with RMSNorm, rope, SwiGLU, no biases, an output matrix of its own, AdamW and a cosine to
    a tenth.

    Touvron et al. 2023, Sections 2.2 and 2.3 (arXiv 2302.13971), without dropout; rates of 3e-4 and 1.5e-4,
    2,000 steps of warm-up. Its start is not published: this is Hugging Face's, and its epsilon of 1e-5 is
    known only second-hand. Llama 3 has ``--rope-theta 5e5``.
    """

    recipe = "pre+rmsnorm+untied+noembedscale+normal002+rope+swiglu+nobias+adamw+cosine+warmup"
    optim: ClassVar[Mapping[str, Any]] = {**ADAMW, "eps": 1e-5}


class OLMo2(NamedBaseline, name="like:olmo2"):
    """OLMo 2: RMSNorm after every branch and on queries and keys, rope, SwiGLU, no biases, an output matrix
    of its own, AdamW, z-loss and a cosine to a tenth.

    OLMo et al. 2025, Sections 2 and 3 (arXiv 2501.00656), with the numbers of the authors' configurations:
    decay on everything but the embeddings; rates of 4e-4 (1B) and 3e-4 (7B and 13B), warm-up over 8.4e9
    tokens. Hugging Face's default configuration has another epsilon and another base of rope.
    """

    recipe = "olmo2+rmsnorm+untied+noembedscale+truncnormal+rope+swiglu+normed+nobias+adamw+cosine+warmup"
    model: ClassVar[Mapping[str, Any]] = {"rope_theta": 5e5}
    optim: ClassVar[Mapping[str, Any]] = {**ADAMW, "weight_decay_on": "all", "roles": "olmo2", "z_loss": 1e-5}


class Gemma3(NamedBaseline, name="like:gemma3"):
    """Gemma 3: zero-centred RMSNorm before and after every branch and on each head's queries and keys, rope,
    GeGLU, no biases, tied embeddings times the root of the width; five sliding layers, then a full one.

    Gemma Team 2025, Section 2 (arXiv 2503.19786). The window is 1,024 positions in the report and 4,096 in
    Hugging Face's default. Google's start, rate, optimizer and schedule were not found: the start is that of
    Hugging Face, and the others are those of most language models. Heads are 256 wide: ``--head-dim 256``.
    """

    recipe = "sandwich+rmsnorm1p+plain+embedscale+normal002+rope+geglu+headnormed+nobias+adamw+cosine+warmup"
    model: ClassVar[Mapping[str, Any]] = {
        "rope_theta": 1e6,
        "sliding_rope_theta": 1e4,
        "sliding_window": 1024,
        "layer_pattern": "SSSSSF",
    }


class Nanochat(NamedBaseline, name="like:nanochat"):
    """nanochat: Pre-LN with x0 and residual lambdas, RMSNorm without gains, also on queries and keys after
    rope, ReLU², no biases, an output matrix of its own and soft-capped logits; Muon with AdamW by role, WSD.

    nanochat's code (gpt.py at 92d63d4); Muon is that of Jordan et al. 2024, as Liu et al. 2025, Section 2
    (arXiv 2502.16982) have it. Left out: value embeddings, the smear of neighbouring tokens, the backout of a
    middle layer, windows of a quarter of the context, what nanochat's own Muon normalises besides, and the
    schedules of Muon's momentum (0.85 to 0.97 to 0.90) and of the decay (a cosine to 0). Rate 0.02 for
    matrices, 40 steps of warm-up, no clipping. Its log finds a cap of 20 best; the code has 15.
    """

    recipe = (
        "x0lambdas+rmsnorm_nogain+untied+noembedscale+nanochatstart+rope+relu2+ropenormed+nobias+softcap"
        "+muon_original+wsd+warmup"
    )
    model: ClassVar[Mapping[str, Any]] = {"embedding_norm": True, "rope_theta": 1e5, "logit_cap": 15.0}
    optim: ClassVar[Mapping[str, Any]] = {
        "roles": "nanochat",
        "weight_decay": 0.28,
        "weight_decay_on": "matrices",
        "max_grad_norm": 0.0,
        "decay_share": 0.65,
        "final_lr_factor": 0.05,
        "label_smoothing": 0.0,
    }


class NGPTBaseline(NamedBaseline, name="like:ngpt"):
    """nGPT: every vector of the stream, and of the weights along it, on the unit sphere, rope, SwiGLU, no
    biases, trained scales of queries, keys, feed-forward and logits; AdamW without decay, and a cosine to 0.

    Loshchilov et al. 2024, Section 2 (arXiv 2410.01131), with the numbers of the authors' code: rate 15e-4,
    an output matrix of its own, and no warm-up, unless the configuration has one and the recipe names it.
    """

    recipe = (
        "ngpt+untied+noembedscale+ngptstart+rope+ngptswiglu+ngptnormed+nobias+logitscale+unitweights"
        "+adamw+cosine"
    )
    optim: ClassVar[Mapping[str, Any]] = {**ADAMW, "weight_decay": 0.0, "final_lr_factor": 0.0}
