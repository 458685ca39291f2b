"""A fact that cannot be known here."""

from __future__ import annotations


class Unknown(Exception):
    """Why a fact is not known; what needs it cannot be tested."""
