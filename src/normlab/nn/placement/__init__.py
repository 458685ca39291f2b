"""Placements: the interface in ``base``, the published ones in ``normed`` and ``scaled``."""
