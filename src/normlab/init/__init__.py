"""Initialisation: schemes that fill matrices, and starts that are profiled on data."""

from .profile import profile_
from .scheme import SCHEMES, initialise_

__all__ = ["SCHEMES", "initialise_", "profile_"]
