"""One run: the trainer, its checkpoints, ranks, precision and outcome."""
