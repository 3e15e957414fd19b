"""What can go wrong between a client and a world's door.

WorldError               all of them; `code` says why, in the door's words where it is the door's
├── ConnectFailed        no world door to begin with, or it lets nobody in
├── ConnectionLost       no way back within the client's patience: the link and all of its sessions are over
├── SessionLost          one session is over, or somebody else's
├── Refused              the door refused a request, and nothing changed (`retry_after_s`)
├── RequestFailed        a request that was taken could not be done (`step`: where the rollout stands)
│   └── Interrupted      it was cut short (`frames`: those that came)
├── Unrepeatable         the socket was lost with a request that would do more if it were made twice
└── TimedOut             nothing came of a request for too long
"""

from collections.abc import Sequence

from omni_live.clients.world_wire import Frame


class WorldError(Exception):
    """Anything this client raises on purpose, but for ValueError where its caller asks for what can't be."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class ConnectFailed(WorldError):
    """There is no world door at the address, or it lets nobody in."""


class ConnectionLost(WorldError):
    """No way back in time; or the link was left."""


class SessionLost(WorldError):
    """The session is over, or somebody else's."""


class Refused(WorldError):
    """The door refused a request, and nothing changed."""

    def __init__(self, code: str, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(code, message)
        self.retry_after_s = retry_after_s


class RequestFailed(WorldError):
    """A request that was taken could not be done. Frames up to `step` are there, each whole."""

    def __init__(self, code: str, step: int, message: str = "") -> None:
        super().__init__(code, message or f"the rollout stands at {step}")
        self.step = step


class Interrupted(RequestFailed):
    """A request was cut short, by `cancel`, by what moves the rollout, or by its end. Frames up to `step` were made;
    those that are not in `frames` can be looked at."""

    def __init__(self, code: str, step: int, frames: Sequence[Frame] = ()) -> None:
        super().__init__(code, step)
        self.frames = tuple(frames)


class Unrepeatable(WorldError):
    """The socket was lost with a request that would do more if it were made twice: an open, or a fork."""


class TimedOut(WorldError):
    """Nothing came of a request for too long; what it does on the server is cancelled."""
