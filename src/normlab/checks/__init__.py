"""``check``: test one training step against properties that must hold exactly.

It imports ``setups`` and ``trace``, and ``diagnosis`` for declared starts; ``watching`` and ``lab`` import
it.
"""
