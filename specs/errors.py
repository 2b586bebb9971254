"""What can go wrong for a user, and the exit code each case has.

A message says what, the numbers, the cause and the next step, in that order.  The command line prints it
alone; anything that is not a `PlaitError` is a bug of ours and keeps its traceback (exit code 1).
"""

from __future__ import annotations


class PlaitError(Exception):
    """Base of all errors a user can cause and mend."""

    exit_code: int = 2


class BadInputError(PlaitError):
    """An input (file, option, value) that cannot be used."""

    exit_code = 2


class NoPlanFitsError(PlaitError):
    """Every layout breaks a constraint; the message names the one that binds."""

    exit_code = 3


class TimeLimitError(PlaitError):
    """The time limit passed before any plan was found."""

    exit_code = 4
