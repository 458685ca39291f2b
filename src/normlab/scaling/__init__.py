"""``transfer``: how a model's activations, updates and best learning rate change with its width and depth.

It imports ``setups``, ``trace``, ``trials`` and ``diagnosis``, and ``nn`` in the module ``parametrisation``
alone; ``lab`` imports it.
"""

from typing import Final

STEPS: Final = 200
"""The steps of a trial by default."""
SEEDS: Final = 2
FIRST_SEED: Final = 0
FACTOR: Final = 1.4
"""A rate carries if the best one changes by at most this factor over all sizes."""
BUDGET_S: Final = 1800.0
LEVEL: Final = 0.95
"""The confidence level of intervals."""
ALL: Final = "*"
"""The module of a row that is about all places of a role together."""
