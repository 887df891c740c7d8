"""The one exception that people are meant to read."""


class UserError(ValueError):
    """Something the person gave cannot be used.

    The message is one line: what was wrong, what was expected, what to do. The command line prints it
    without a traceback and exits with code 2.
    """

    def __str__(self) -> str:
        """The message in one line, also if a file's name in it has several."""
        return " ".join(super().__str__().splitlines())


def shorten(value: object) -> str:
    """A value or an error as at most 100 characters of one line."""
    return " ".join(str(value)[:300].split())[:100]
