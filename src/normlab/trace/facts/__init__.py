"""What a step is made of: tokens, logits, targets, padding, documents, stacks and roles. Each may be unknown."""
