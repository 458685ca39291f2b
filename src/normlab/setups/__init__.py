"""What a training script holds right before its first step (``Setup``), and the places that one comes from.

It imports ``trace`` and torch, and no model of normlab's own; every instrument takes a setup and so imports
it.
"""
