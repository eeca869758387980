"""What goes wrong where a call is right."""


class UnavailableError(RuntimeError):
    """A backend cannot be used here; the message says what is missing and how to get it."""
