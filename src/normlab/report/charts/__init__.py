"""Charts from tables: pure functions of polars frames, which read no file and do not import torch."""
