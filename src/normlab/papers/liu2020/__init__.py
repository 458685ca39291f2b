"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249).

``gradients`` holds its claims about vanishing gradients, ``dependency`` those about branches and the change
of the output, ``training`` its trainings, and ``variants`` dropout, rescaled initial weights, plain forms and
sizes.
"""

from normlab.papers.liu2020 import dependency, gradients, training, variants

MODULES = (gradients, dependency, training, variants)
