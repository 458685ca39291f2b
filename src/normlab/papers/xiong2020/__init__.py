"""Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv 2002.04745).

``theory`` holds its lemmas about initialisation, ``gradients`` its theorem and figures about gradients,
``training`` its trainings on IWSLT'14, ``large`` the others. "ICLR" is the earlier submission, which says
more about settings.
"""

from normlab.papers.xiong2020 import gradients, large, theory, training

MODULES = (theory, gradients, training, large)
