"""The core's errors.

    SessionError
    +-- Illegal       our own caller did something the tables do not know (a bug on our side of the socket)

What a client does wrong is no exception: it is answered by an `ErrorTold` event and counted.
"""


class SessionError(Exception):
    """Base of the core's errors."""


class Illegal(SessionError):
    """A transition or call that the tables do not contain."""
