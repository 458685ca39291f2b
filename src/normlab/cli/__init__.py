"""The command line: parse, call one function, print.

It may import every room, and imports most of them when a command needs them; only ``python -m normlab``
imports it.
"""
