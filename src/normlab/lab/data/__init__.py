"""Parallel and plain text, from raw files or the built-in corpus to padded batches."""
