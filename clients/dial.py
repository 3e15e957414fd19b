"""How every client of ours opens its websocket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.typing import Subprotocol

PING_S: Final = 10.0
TRY_AGAIN_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""What an upgrade may be refused with and be worth another try."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, who asks, and how its socket is to be."""

    url: str
    api_key: str | None
    key_scheme: str = "Bearer"
    subprotocols: Sequence[str] = ()
    max_frame_bytes: int = 16 * 1024 * 1024
    close_within_s: float = 2.0
    ping_timeout_s: float = 60.0
    """Without a pong for so long the socket counts as lost. A server that computes on its event loop, as OpenPI's own
    does, answers none meanwhile."""

    async def dial(self, within_s: float, url: str | None = None) -> ClientConnection:
        """A websocket; raises OSError, TimeoutError, InvalidHandshake, InvalidURI. `url` in place of its own."""
        url = url or self.url
        loopback = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
        return await open_socket(
            url,
            additional_headers={"Authorization": f"{self.key_scheme} {self.api_key}"} if self.api_key else None,
            subprotocols=[Subprotocol(name) for name in self.subprotocols] or None,
            compression=None,
            max_size=self.max_frame_bytes,
            open_timeout=within_s,
            close_timeout=self.close_within_s,
            ping_interval=PING_S,
            ping_timeout=self.ping_timeout_s,
            proxy=None if loopback else True,
        )
