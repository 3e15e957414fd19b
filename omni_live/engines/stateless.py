"""What engines have in common that keep nothing of a session between its turns."""

from collections.abc import Mapping

from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey


class Stateless:
    """The part of engines.contract.Engine that is about sessions, for an engine that only knows which are open."""

    def __init__(self) -> None:
        self.sessions: set[SessionKey] = set()

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self.sessions.add(session)

    def close(self, session: SessionKey) -> None:
        self.sessions.discard(session)

    def listen(self, session: SessionKey, payload: Payload) -> None:
        """Nothing is said to it outside turns."""

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        self.sessions.add(into)

    def snapshot(self, session: SessionKey) -> Payload:
        return Payload("nothing")

    def restore(self, session: SessionKey, payload: Payload) -> None:
        """There is nothing to go back to."""
