"""Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv 2002.04745).

``theory`` holds its lemmas about initialisation, ``gradients`` its theorem and figures about gradients,
``training`` its trainings. "ICLR" is the earlier submission, which says more about settings.
"""

from __future__ import annotations

from typing import Final

from normlab.papers.xiong2020 import gradients, theory, training
from normlab.spec.artefact import Artefact

ARTEFACTS: Final[tuple[Artefact, ...]] = (
    theory.TABLE1,
    theory.LEMMA1,
    theory.LEMMA2,
    theory.LEMMA3,
    gradients.THEOREM1,
    theory.CONCENTRATION,
    theory.APPENDIX_G,
    training.FIG2A,
    training.FIG2B,
    training.LOSS_VS_BLEU,
    training.SIMPLIFIED,
    gradients.FIG3AB,
    gradients.FIG3CD,
    gradients.APPENDIX_F,
    training.FIG4AB,
    training.FIG4CD,
    training.FIG5A,
    training.FIG5BC,
    training.FIG6,
    training.CLIP,
    training.FOOTNOTE1,
)
