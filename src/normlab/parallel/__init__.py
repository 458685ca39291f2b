"""``check --ranks``: one training step on several processes, beside the same step in one.

It imports ``checks`` for what a report is, ``setups`` for how a script is recorded, and torch.
"""
