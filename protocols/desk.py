"""What a door asks of the server it stands in. Doors know sessions and events; they know no stage and no worker."""

from typing import Protocol

from omni_live.sessions.effects import Effect
from omni_live.sessions.inputs import Input
from omni_live.sessions.settings import Settings


class Refused(Exception):
    """The server cannot take the session now (overloaded, draining, unknown model, no ready stage)."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class ResumeRefused(Exception):
    """A resume that cannot be: invalid_session_resume, session_resume_expired, invalid_resume_token, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Mailbox(Protocol):
    """One attachment's way out; never blocks.

    Gets Emit, Hold, Unhold, Replace and at the end Release, in order, and each RaiseFence as soon as the session
    wants it: content that waits here is stale from then on.
    """

    def take(self, effects: list[Effect]) -> None: ...


class Line(Protocol):
    """A session as a door holds it."""

    @property
    def session_id(self) -> str: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def attachment(self) -> int:
        """The number of the attachment that this line stands for."""

    @property
    def token(self) -> str:
        """What a resume of the session must show now; for doors whose clients have no tokens of their own."""

    def tell(self, input: Input) -> None:
        """Give the session an input; effects for the client reach the mailbox, perhaps before this returns."""


class Desk(Protocol):
    """Opens and finds sessions."""

    async def open(self, model: str, settings: Settings, mailbox: Mailbox, owner: str) -> Line:
        """Admit and open a session (waiting in the bounded queue if it must); `owner` is the API key's name.

        Raises Refused. A task cancelled meanwhile leaves nothing behind.
        """

    def resume(self, session_id: str, token: str, seen: int | None, sent: int, mailbox: Mailbox, owner: str) -> Line:
        """Attach to a session whose transport was lost (or is to be replaced). Raises ResumeRefused.

        `seen` None: of what was said before, nothing is said again.
        """

    def fork(self, line: Line, at: int | None, mailbox: Mailbox, owner: str) -> Line:
        """A second session that goes on from frame `at` of the rollout at `line`, None: from where it stands.

        Never waits for a place. Raises Refused, and the rollout at `line` is as it was: overloaded, draining,
        session_not_found, unsupported, not_started, state_not_ready, bad_step, rewind_ahead, rewind_too_far.
        """
