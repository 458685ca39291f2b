"""Plans, the queue, the training loop, and what a run's metrics amount to."""
