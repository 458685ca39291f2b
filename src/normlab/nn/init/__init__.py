"""Initialisation: schemes that fill matrices, and parameters that are profiled on data."""

from normlab.nn.init.profile import admin_, profile_
from normlab.nn.init.scheme import SCHEMES, Scheme, initialise_, scale_start_

__all__ = ["SCHEMES", "Scheme", "admin_", "initialise_", "profile_", "scale_start_"]
