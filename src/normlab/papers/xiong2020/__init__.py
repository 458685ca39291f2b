"""Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv 2002.04745).

``theory`` holds its lemmas about initialisation, ``gradients`` its theorem and figures about gradients,
``training`` its trainings on IWSLT'14, ``large`` the others. "ICLR" is the earlier submission, which says
more about settings.
"""

from normlab.papers.artefact import Paper
from normlab.papers.xiong2020 import gradients, large, theory, training

MODULES = (theory, gradients, training, large)

PAPER = Paper(
    "xiong2020",
    "On Layer Normalization in the Transformer Architecture",
    "Xiong et al. 2020",
    "https://arxiv.org/abs/2002.04745",
    "A Post-LN needs warm-up because its gradients are large near the output when training begins. By "
    "mean-field arguments, the gradient of the last feed-forward does not depend on the depth in a "
    "Post-LN, and falls as one over the square root of the depth in a Pre-LN. A Pre-LN can therefore be "
    "trained without warm-up, arrives sooner, in translation and in the pre-training of BERT, and ends as "
    "good.",
)
