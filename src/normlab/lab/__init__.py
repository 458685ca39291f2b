"""The laboratory: trains models by recipe on real text, and compares recipes over seeds.

It stands on the instruments and on ``nn`` and ``optim``; none of these imports it.
"""
