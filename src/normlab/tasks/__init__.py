"""Tasks: one file for the batches, model, loss and metrics of each."""
