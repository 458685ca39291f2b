"""Short real trainings of the user's own model, which show what learning rates train."""

from typing import Final

STEPS: Final = 100
"""The steps of a trial by default."""
