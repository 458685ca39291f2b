"""What a step is made of: tokens, targets, padding, documents, stacks, roles. Each may be unknown."""


class Unknown(Exception):
    """Why a fact is not known; what needs it cannot be tested."""
