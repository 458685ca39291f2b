"""The command line: parse, call one function, print.

It may import every room, and imports most of them when a command needs them. Only ``python -m normlab`` and
the installed command ``normlab`` import it.
"""
