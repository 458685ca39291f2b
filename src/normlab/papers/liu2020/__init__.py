"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249).

``gradients`` holds its claims about vanishing gradients, ``dependency`` those about branches and the change
of the output, ``training`` its trainings, ``deep`` those of 18 layers.
"""

from normlab.papers.liu2020 import deep, dependency, gradients, training

MODULES = (gradients, dependency, training, deep)
