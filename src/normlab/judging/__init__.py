"""``judge``: whether a change is real, from the scores of any runs over seeds.

It needs numpy and scipy alone, and imports ``base`` and ``errors``; ``lab`` imports its statistics.
"""
