"""What a training script holds right before its first step (``Setup``), and the places that one comes from.

Instruments take a setup and nothing else, so a model of the user's and one of ours are the same everywhere.
"""
