"""What can go wrong, and the exit code that tells it: 1 is left to a check that failed, 2 to argparse."""

from __future__ import annotations

OK, FAILED, USAGE, CANNOT_RUN, INVALID_DATA, INTERRUPTED = 0, 1, 2, 3, 4, 130


class CannotRunError(RuntimeError):
    """This machine lacks something; the message names it and the command that mends it."""


class InvalidDataError(ValueError):
    """A report or a table is not what it should be; nothing of it may be used."""
