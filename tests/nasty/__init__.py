"""Training steps that do what a measurement must not be changed by, nor change."""
