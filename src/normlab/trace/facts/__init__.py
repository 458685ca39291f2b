"""What a step is made of: tokens, targets, padding, documents, stacks, roles. Each may be unknown."""


class Unknown(Exception):
    """Says why a fact is not known; nothing that needs it can be tested."""
