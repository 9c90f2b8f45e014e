"""The one exception for what a user can get wrong."""


class UserError(ValueError):
    """A mistake in a config, file or flag: one line that names the values and the rule.

    The command line prints it without a traceback and leaves with exit status 2.
    """
