"""What the command line answers with one line and no traceback."""


class UserError(ValueError):
    """A mistake in a config, file or flag: one line that names the values and the rule.

    The command line leaves with exit status 2.
    """


class NonFiniteError(FloatingPointError):
    """Training produced an infinity or NaN; names step and metric. Exit status 1."""
