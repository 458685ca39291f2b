"""Fast forms of operations, each with a plain, exportable and twice differentiable reference."""
