"""What pages show of the results of instruments, as typed objects that are read from plain values.

A page draws what ``to_dict()`` of a result returns, or what a file holds of it, because it needs neither
torch nor the instrument. Each class here has a function ``of``, the one place where the keys of such values
are read; keys that no page shows are left out.
"""
