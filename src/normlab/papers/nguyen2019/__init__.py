"""Nguyen and Salazar 2019, Transformers without Tears (arXiv 1910.05895)."""

from normlab.papers.nguyen2019 import training

MODULES = (training,)
