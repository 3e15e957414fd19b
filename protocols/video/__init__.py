"""The video protocol: a world model's frames as fragments of an MP4 file, steered while they are made.

Event names are vllm-omni's (`/v1/realtime/video`), where it has one. Sans-IO but for the ASGI adapter,
`omni_live.protocols.video.asgi`.
"""

from omni_live.protocols.video.messages import read

__all__ = ["read"]
