"""Statistics of signals: what is measured of a module, and when, without changing its numbers."""
