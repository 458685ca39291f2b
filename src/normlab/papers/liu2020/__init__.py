"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249)."""

from normlab.papers.liu2020 import initial, training

MODULES = (initial, training)
