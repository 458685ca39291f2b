"""The papers' tables and figures as data, one module per paper; no torch.

A module of your own adds a paper by ``publish``, each artefact with the function that measures it;
``normlab papers --import my_module`` then lists it and ``normlab papers reproduce`` measures it.
"""

from normlab.papers.artefact import Artefact, Drawing, Measurement, Paper
from normlab.papers.claim import Claim, Measure
from normlab.papers.registry import ARTEFACTS, PAPERS, chosen, find_artefact, keys, publish

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
