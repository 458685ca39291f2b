"""Nguyen and Salazar 2019, Transformers without Tears (arXiv 1910.05895).

``tables`` holds its tables, and ``figures`` its figures, what it says of speed, and a conjecture.
"""

from normlab.papers.nguyen2019 import figures, tables

MODULES = (tables, figures)
