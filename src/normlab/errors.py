"""The one exception that means: the input is wrong, and here is what to change."""


class UserError(ValueError):
    """An input that cannot be used: what was given, what is allowed, what to type next.

    It is raised where a value comes from a person (a flag, a file, an argument). The command line prints its
    sentence alone; any other exception is an error of normlab and is shown with its traceback.
    """
