"""Table -> chart. Pure functions of polars frames; nothing here reads a file or imports torch."""
