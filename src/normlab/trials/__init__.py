"""Short real trainings of the user's own model, which say what learning rates train."""

from typing import Final

STEPS: Final = 100
"""Steps of a trial by default."""
