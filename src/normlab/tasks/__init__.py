"""Tasks: batches, a loss and a metric each."""
