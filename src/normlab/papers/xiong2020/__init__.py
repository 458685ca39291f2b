"""Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv 2002.04745).

"ICLR" is the earlier submission, which says more about settings.
"""

from normlab.papers.xiong2020 import initial, training

MODULES = (initial, training)
