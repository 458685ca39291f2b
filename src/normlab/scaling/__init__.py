"""How things change with a model's width and depth: activations, updates, and the best learning rate."""

from typing import Final

STEPS: Final = 200
"""Steps of a trial by default."""
SEEDS: Final = 2
FIRST_SEED: Final = 0
FACTOR: Final = 1.4
"""By how much the best rate may move over all sizes, and carry nevertheless."""
BUDGET_S: Final = 1800.0
LEVEL: Final = 0.95
"""The confidence of intervals."""
ALL: Final = "*"
"""The module of a row that holds for all places of a role together."""
