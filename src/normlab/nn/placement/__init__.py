"""Placements: the interface in ``base``, the published ones in ``normed``, ``scaled`` and ``streamed``."""
