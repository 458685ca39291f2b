"""Which extra of normlab's brings a package that is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

EXTRAS: Final[Mapping[str, Sequence[str]]] = {
    "charts": ("altair", "vl_convert", "polars"),
    "lab": (
        *("tokenizers", "safetensors", "sacrebleu", "sacremoses", "sentencepiece"),
        *("num2words", "babel", "pylatexenc"),
    ),
    "hf": ("transformers", "datasets", "accelerate", "x_transformers"),
    "lightning": ("lightning",),
    "cluster": ("ray",),
    "tensorboard": ("tensorboard",),
}
"""For each extra, the modules that its packages are imported by. The laboratory's commands draw pictures, so
``lab`` contains ``charts``.
"""


def extra_for(error: ModuleNotFoundError) -> str:
    """Return the extra that brings the module which could not be found; empty if none does."""
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return extra
    return ""


def what_to_install(what: str, extra: str) -> str:
    """Return the sentence that says what to type for something that needs an extra: ``normlab compare needs
    the laboratory; type: pip install 'normlab[lab]'``.
    """
    parts = {"lab": "the laboratory", "charts": "what draws charts"}
    return f"{what} needs {parts.get(extra, f'the extra {extra}')}; type: pip install 'normlab[{extra}]'"
