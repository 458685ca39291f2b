"""What a training script holds right before its first step (``Setup``), and the ways to get one.

This package imports ``trace`` and torch, but no model of normlab's own. All instruments but ``judge``, which
looks at scores alone, import it.
"""
