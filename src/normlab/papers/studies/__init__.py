"""The functions that measure what papers claim, each called with a ``Lab`` and its settings."""
