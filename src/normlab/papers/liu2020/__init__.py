"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249).

``gradients`` holds its claims about vanishing gradients, ``dependency`` those about branches and the change
of the output, ``training`` its tables of BLEU, ``deep`` the trainings of 18 layers, and ``variants`` dropout,
rescaled initial weights, plain forms and sizes.
"""

from normlab.papers.artefact import Paper
from normlab.papers.liu2020 import deep, dependency, gradients, training, variants

MODULES = (gradients, dependency, training, deep, variants)

PAPER = Paper(
    "liu2020",
    "Understanding the Difficulty of Training Transformers",
    "Liu et al. 2020",
    "https://arxiv.org/abs/2004.08249",
    "Vanishing gradients are not what makes a deep Post-LN fail. It leans heavily on its residual "
    "branches, so that a small change of the weights moves its output far: by a sum that grows with the "
    "depth N, and in a Pre-LN only with log N. Admin gives the shortcut a profiled weight, so that a "
    "model begins as stably as a Pre-LN, and keeps what Post-LN can reach: it trains 18 and 60 layers, "
    "and is the best in every row.",
)
