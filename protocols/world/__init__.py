"""The world protocol: rollouts of world models that are stepped, looked at, rewound, forked and restored.

Sans-IO, for servers and clients; the server's ASGI adapter is `omni_live.protocols.world.asgi`.
"""

from omni_live.protocols.world.contract import WorldContract
from omni_live.protocols.world.messages import MSGPACK_SUBPROTOCOL, dump, load

__all__ = ["MSGPACK_SUBPROTOCOL", "WorldContract", "dump", "load"]
