"""Named baselines: language models as they are published, which a recipe begins with as ``like:llama``.

A baseline is a recipe and the fields that no part of a recipe sets. Sizes, lengths, the learning rate and the
number of warm-up steps stay those of the base configuration, because they go with the size of the model.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from normlab.config.config import Config
from normlab.nn.registry import Registered, Registry

LIKE = "like:"
"""Where the names of baselines begin, some of which are also names of placements."""
ADAMW: Mapping[str, Any] = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "weight_decay_on": "matrices",
    "max_grad_norm": 1.0,
    "final_lr_factor": 0.1,
    "label_smoothing": 0.0,
}
"""What most language models train with: AdamW with decay on matrices, clipped, down to a tenth of the rate."""


class NamedBaseline(Registered, ABC):
    """Base of all baselines; a subclass registers itself under ``like:`` and its name."""

    registry: ClassVar[Registry[type[NamedBaseline]]] = Registry("baseline")
    recipe: ClassVar[str]
    """Its parts, as a recipe."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Fields of ``ModelConfig`` beside the parts."""
    optim: ClassVar[Mapping[str, Any]] = ADAMW
    """Fields of ``OptimConfig`` beside the parts."""

    @classmethod
    def applied_to(cls, base: Config, kept: Collection[str] = ()) -> Config:
        """Return the base with the baseline's fields, but for those in ``kept``, which are the user's own."""

        def chosen(section: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in section.items() if name not in kept}

        model = replace(base.model, **chosen({"dropout": 0.0, **cls.model}))
        return replace(base, model=model, optim=replace(base.optim, **chosen(cls.optim)))


class GPT2(NamedBaseline, name="like:gpt2"):
    """GPT-2: Pre-LN with biases, learned positions, GELU in its tanh form, tied embeddings without a factor,
    AdamW and a cosine to a tenth.

    Radford et al. 2019 (Language Models are Unsupervised Multitask Learners) for the model, with the start of
    nanoGPT and of Hugging Face, after Brown et al. 2020, Section 2.1 (arXiv 2005.14165). Optimiser and
    schedule are those of nanoGPT at 3adf61e1, without dropout: rate 6e-4 at 124M parameters, 2,000 of 600,000
    steps of warm-up. nanoGPT trains without biases: ``like:gpt2+nobias``.
    """

    recipe = "pre+layernorm+plain+noembedscale+gpt2start+learned+gelu_tanh+bias+adamw+cosine+warmup"


class Llama(NamedBaseline, name="like:llama"):
    """Llama: Pre-LN with RMSNorm, rope, SwiGLU, no biases, an output matrix of its own, AdamW and a cosine to
    a tenth.

    Touvron et al. 2023, Sections 2.2 and 2.3 (arXiv 2302.13971), without dropout; rates of 3e-4 and 1.5e-4,
    2,000 steps of warm-up. Its start is not published: this is Hugging Face's, and its epsilon of 1e-5 is
    known from second hand. Llama 3 has ``--rope-theta 5e5``.
    """

    recipe = "pre+rmsnorm+untied+noembedscale+normal002+rope+swiglu+nobias+adamw+cosine+warmup"
    optim: ClassVar[Mapping[str, Any]] = {**ADAMW, "eps": 1e-5}
