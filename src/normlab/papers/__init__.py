"""The papers' tables and figures as data, one module per paper; no torch.

A module of your own adds a paper by ``publish``, each artefact with the function that measures it;
``normlab papers --import my_module`` then lists it and ``normlab papers reproduce`` measures it. A name is
imported when it is first used, so a command that only needs a scale does not wait for the papers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normlab.papers.artefact import Artefact, Drawing, Measurement, Paper
    from normlab.papers.claim import Claim, Measure
    from normlab.papers.registry import ARTEFACTS, PAPERS, chosen, find_artefact, keys, publish

_HOME = {
    **dict.fromkeys(("Artefact", "Drawing", "Measurement", "Paper"), "artefact"),
    **dict.fromkeys(("Claim", "Measure"), "claim"),
    **dict.fromkeys(("ARTEFACTS", "PAPERS", "chosen", "find_artefact", "keys", "publish"), "registry"),
}

__all__ = [
    "ARTEFACTS",
    "PAPERS",
    "Artefact",
    "Claim",
    "Drawing",
    "Measure",
    "Measurement",
    "Paper",
    "chosen",
    "find_artefact",
    "keys",
    "publish",
]


def __getattr__(name: str) -> object:
    """Import a name from its home (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"normlab.papers has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"normlab.papers.{_HOME[name]}"), name)
