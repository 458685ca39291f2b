"""Fast forms of operations, each with a plain reference that is exportable and twice differentiable."""
