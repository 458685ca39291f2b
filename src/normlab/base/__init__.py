"""What every room uses: numbers in words, strict reading, files written whole, parts by name, charts as data.

It imports pydantic and the standard library, and never torch; every other room may import it.
"""
