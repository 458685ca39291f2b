"""Parallel, plain and labelled text, from raw files or the built-in corpus to padded batches."""
