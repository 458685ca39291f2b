"""Nguyen and Salazar 2019, Transformers without Tears (arXiv 1910.05895).

``tables`` holds its tables but for those of much data and of perplexities, which ``large`` holds, ``figures``
its figures, what it says of speed, and a conjecture.
"""

from normlab.papers.artefact import Paper
from normlab.papers.nguyen2019 import figures, large, tables

MODULES = (tables, large, figures)

PAPER = Paper(
    "nguyen2019",
    "Transformers without Tears: Improving the Normalization of Self-Attention",
    "Nguyen and Salazar 2019",
    "https://arxiv.org/abs/1910.05895",
    "On small parallel corpora a Pre-LN is stable where a Post-LN is not, unless initialisation is "
    "smaller (SmallInit). One learned length in place of LayerNorm's gains and biases (ScaleNorm), and "
    "word embeddings of one length (FixNorm), are faster and translate better: 1.1 BLEU above a strong "
    "Post-LN on average over five pairs of languages. Warm-up can mostly be left out then. With much data "
    "Post-LN is the better one.",
)
