"""The laboratory: trains models by recipe on real text, and compares recipes over seeds.

It stands on the instruments and on ``nn`` and ``optim``, none of which imports it; ``papers``, ``cli`` and
the pages of its own results do.
"""
