"""``trial``: short real trainings of the user's own model, which show what learning rates train.

It imports ``setups`` and ``trace``; ``scaling`` and ``lab`` import it.
"""

from typing import Final

STEPS: Final = 100
"""The steps of a trial by default."""
