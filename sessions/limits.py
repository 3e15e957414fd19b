"""Every limit, its default, and what happens when it is reached.

A deploy file overrides single values under `limits:`. Times are in seconds (`_s`) or milliseconds (`_ms`), sizes in
bytes. `docs/limits.md` says the same for operators: if you add a field, add its row there too.
"""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server; all of them are enforced."""

    # -- leases: what a session may keep, and for how long
    idle_lease_s: float = 300.0
    """No client input and no turn running for so long: the session closes (`idle`)."""
    detach_grace_s: float = 30.0
    """No transport attached for so long: the session closes (`detached`). A resume before that continues it."""
    max_age_s: float = 86_400.0
    """The session closes (`max_age`), whatever it does."""
    max_age_warning_s: float = 60.0
    """The client is told so long before `max_age_s`."""
    open_timeout_s: float = 10.0
    """Not open by then: the session closes (`open_timeout`) and gives back all it took."""

    # -- frames and buffers
    client_frame_bytes: int = 16 * MIB
    """A larger client frame closes the connection (1009) or the request (413). OpenPI doors: `openpi_frame_bytes`."""
    openpi_frame_bytes: int = 64 * MIB
    """As `client_frame_bytes`, for OpenPI doors, whose observations carry raw images."""
    server_frame_bytes: int = 960 * KIB
    """JSON doors split content so that no frame is larger: common clients refuse frames over 1 MiB."""
    outbox_bytes: int = 4 * MIB
    """Frames waiting for one connection. Reached: the connection is aborted, the session detached."""
    journal_bytes: int = 8 * MIB
    """Unacknowledged frames kept for a resume. Reached: the oldest go, and a resume names the range that is gone."""
    journal_s: float = 60.0
    """As `journal_bytes`, by age."""

    # -- transport deadlines
    write_deadline_s: float = 5.0
    """One send that takes longer: the transport is aborted and the session detached."""
    header_deadline_s: float = 5.0
    """A request whose headers are not complete by then: the connection is closed."""
    tcp_user_timeout_s: float = 15.0
    """Sent bytes unacknowledged for so long: the kernel drops the connection (TCP_USER_TIMEOUT)."""
    ping_s: float = 20.0
    """A websocket ping goes out this often."""
    ping_timeout_s: float = 60.0
    """A websocket peer that has not answered a ping by then: the connection is closed and the session detached."""
    drain_s: float = 30.0
    """After SIGTERM running turns may go on for so long; then every session closes (`drained`)."""

    # -- admission
    max_sessions: int = 256
    """Sessions over all pipelines. Reached: an open waits in the queue."""
    max_sessions_per_pipeline: int = 256
    """Sessions of one pipeline. Reached: an open waits in the queue."""
    max_bytes: int = 16 * GIB
    """State that all sessions may cost over all pipelines. Reached: an open waits in the queue."""
    max_bytes_per_pipeline: int = 16 * GIB
    """State that the sessions of one pipeline may cost. Reached: an open waits in the queue."""
    max_duty_permille: int = 1_000_000
    """Replica time that all sessions may cost, in thousandths of one replica. Reached: an open waits in the queue."""
    wait_queue: int = 64
    """Opens that wait. Reached: an open is refused with a time to try again (`overloaded`)."""
    wait_deadline_s: float = 10.0
    """An open that has waited so long is refused (`overloaded`)."""

    # -- turns
    max_reply_s: float = 60.0
    """Audio of one reply. Reached: the turn ends as incomplete (`max_output_tokens`)."""
    lead_ms: int = 800
    """Audio released ahead of playback; more waits in the session, and the stage's credit with it. 0: unpaced."""
    turn_deadline_s: float = 300.0
    """A turn of which no output came for so long fails (`timeout`)."""
    conversation_items: int = 512
    """Items of one conversation. Reached: the oldest go, and the client is told which."""
    conversation_chars: int = 1024 * KIB
    """Characters in all items of one conversation. Reached: the oldest go; a single longer item is refused."""
    mailbox_turns: int = 64
    """Plain turns that wait behind the running one of their session. Reached: a turn is refused (`mailbox_full`)."""
    hold_patience_ms: int = 1_000
    """A reply is held no longer than this after the last word from the ears: a client that falls silent for good
    sends no audio in which the ears could find that it is silent. Reached: the reply goes on."""
    transcript_patience_s: float = 15.0
    """A transcript that has not come by then fails, and whoever waits for it goes on without."""
    abort_deadline_ms: int = 2_000
    """A worker that still holds an aborted turn after this is wedged: it is killed, its sessions move on."""
    chunk_credits: int = 8
    """Chunks under way per turn on a chunk edge of which the pipeline says nothing else. Reached: the stage waits."""
    client_credits: int = 16
    """Chunks under way from a stage to the session. Reached: the stage waits until the session gives credit."""

    # -- rollouts
    rewind_steps: int = 256
    """Frames that a rollout goes back. Reached: a rewind, fork or look is refused (`rewind_too_far`, `step_unknown`).
    The engine's option of this name must not be less."""
    step_frames: int = 256
    """Frames of one request. Reached: it fails (`bad_frames`)."""
    snapshot_frames: int = 64
    """Frames after which a rollout's state is saved; its loss costs making at most about as many again."""
    rollout_credits: int = 64
    """Frames that may be sent to a client before it gives credit, unless it asks for another number. Reached: they
    wait, and so do its next steps."""
    rollout_actions: int = 1024
    """Frames whose actions are kept because no snapshot came. Reached: steps fail (`history_full`)."""

    # -- replicas
    replica_wait_s: float = 10.0
    """Work for a stage without a ready replica waits so long, then fails (`replica_unavailable`)."""
    replica_wait_items: int = 256
    """Pieces of such work per session, each of 4 KiB at most. Reached: input is dropped and counted, turns fail."""
    start_timeout_s: float = 300.0
    """A worker that is not ready by then is killed and counts as crashed."""
    restarts: int = 5
    """Crashes of a stage's replicas within `restart_window_s` before its breaker opens: sessions are refused."""
    restart_window_s: float = 60.0
    """The window of `restarts`."""
    restart_backoff_ms: int = 250
    """Wait before the first restart; it doubles with each crash in the window."""
    restart_backoff_cap_ms: int = 10_000
    """No wait before a restart is longer."""
    breaker_s: float = 30.0
    """An open breaker starts one replica as a probe after this; ready closes it, a crash opens it again."""
