"""What all websocket doors share: the outbox of one connection and, in `asgi`, the tasks that read and write."""

from typing import Final, Protocol

TRANSPORT_KEY: Final = "omni_live.transport"
"""Where in an ASGI scope the server leaves the connection's `Transport`."""

OWNER_KEY: Final = "omni_live.owner"
"""Where in an ASGI scope the server leaves the name of the API key that the client showed ("" without keys)."""


class Transport(Protocol):
    """The socket under a websocket, as far as ASGI does not offer it."""

    @property
    def is_writable(self) -> bool:
        """Whether the next send goes straight to the kernel."""

    async def writable(self) -> None:
        """Wait until it does, or until the connection is lost."""

    def abort(self) -> None:
        """Drop the connection now, whatever waits to be written."""


class Meter(Protocol):
    """What a connection reports about itself."""

    def content_handed(self, nbytes: int) -> None:
        """So many bytes of content were handed to the socket just now."""

    def dropped(self, reason: str, count: int = 1) -> None: ...
    def outbox(self, change: int) -> None:
        """So many bytes more (or fewer) wait in outboxes."""

    def connection_lost(self, why: str) -> None:
        """The server ended a connection for this reason: slow_consumer or write_deadline."""
