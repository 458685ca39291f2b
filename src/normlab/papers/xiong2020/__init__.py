"""Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv 2002.04745).

``theory`` holds its lemmas, theorem and figures about initialisation, ``training`` its trainings on IWSLT'14,
``large`` the others. "ICLR" is the earlier submission, which says more about settings.
"""

from normlab.papers.xiong2020 import large, theory, training

MODULES = (theory, training, large)
