"""The duplex protocol: OpenAI's GA Realtime events and vllm-omni's duplex additions, with numbered input and output.

Sans-IO, for servers and clients; the server's ASGI adapter is `omni_live.protocols.duplex.asgi`.
"""

from omni_live.protocols.duplex.codec import (
    HEARS_HZ,
    MSGPACK_SUBPROTOCOL,
    SPEAKS_HZ,
    Decoder,
    Encoder,
    OpenAsked,
    ResumeAsked,
    Told,
    default_settings,
)
from omni_live.protocols.duplex.session_object import describe, merge

__all__ = [
    "HEARS_HZ",
    "MSGPACK_SUBPROTOCOL",
    "SPEAKS_HZ",
    "Decoder",
    "Encoder",
    "OpenAsked",
    "ResumeAsked",
    "Told",
    "default_settings",
    "describe",
    "merge",
]
