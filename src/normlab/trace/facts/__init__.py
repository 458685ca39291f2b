"""What a step is made of: tokens, targets, padding, documents, stacks, roles. Each may be unknown."""
