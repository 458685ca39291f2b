"""Short real trainings of the user's own model, which say what learning rates train."""
