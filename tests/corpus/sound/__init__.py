"""Sound steps, in which a check must find no failure, by kind of model."""

from __future__ import annotations
