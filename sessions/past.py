"""What makes a rollout's state again, wherever its replica went: a base, and the actions of the frames after it."""

from dataclasses import dataclass, replace

from omni_live.sessions.payload import ArraySpec, Payload

ACTION_BYTES = 1024
"""The most that the actions of one frame may take."""


@dataclass(frozen=True, slots=True)
class Actions:
    """A row of bytes for each frame, and how to read one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one row."""
    rows: tuple[bytes, ...]

    @classmethod
    def read(cls, payload: Payload, frames: int) -> "Actions | None":
        """The rows of a payload with one array (frames, ...), None where it is not one. Copies them."""
        if len(payload.arrays) != 1:
            return None
        (spec,) = payload.arrays
        if not spec.shape or spec.shape[0] != frames or not 0 < payload.nbytes <= frames * ACTION_BYTES:
            return None
        if payload.nbytes % frames:
            return None
        body, size = bytes(payload.body), payload.nbytes // frames
        rows = tuple(body[at : at + size] for at in range(0, len(body), size))
        return cls(spec.name, spec.dtype, tuple(spec.shape[1:]), rows)

    def payload(self, step: int) -> Payload:
        """What a stage is to make of them, from frame `step` on."""
        spec = ArraySpec(self.name, self.dtype, (len(self.rows), *self.shape))
        return Payload("actions", {"step": step}, b"".join(self.rows), (spec,))


@dataclass(slots=True)
class Past:
    """One line of frames. `actions` are those of the frames after `reach`, so that base and actions make `position`."""

    base: Payload
    """What a stage is fed to begin it, or given back where `is_snapshot`."""
    is_snapshot: bool
    laid: int
    """The last frame that the base brings."""
    reach: int
    """The last frame of these that still counts: a snapshot may go further than where the rollout went back to."""
    position: int
    """The last frame that came to the session; frames count from 0."""
    highest: int
    """The furthest that this line ever was: how far back a stage can go depends on it."""
    actions: Actions | None = None
    """None where there are no frames after `reach`."""

    @classmethod
    def started(cls, reset: Payload) -> "Past":
        return cls(reset, False, 0, 0, 0, 0)

    @classmethod
    def restored(cls, state: Payload, step: int) -> "Past":
        return cls(state, True, step, step, step, step)

    @property
    def count(self) -> int:
        """Frames after the base."""
        return self.position - self.reach

    def floor(self, rewind_steps: int) -> int:
        """The oldest frame that can be gone back to."""
        return max(0, self.highest - rewind_steps)

    def commit(self, actions: Actions, row: int) -> None:
        """One more frame came, made of that row."""
        known = () if self.actions is None else self.actions.rows
        self.actions = replace(actions, rows=(*known, actions.rows[row]))
        self.position += 1
        self.highest = max(self.highest, self.position)

    def saved(self, state: Payload, step: int) -> None:
        """`state` is a snapshot of this line at frame `step`."""
        if self.actions is not None:
            rows = self.actions.rows[step - self.reach :]
            self.actions = replace(self.actions, rows=rows) if rows else None
        self.base, self.is_snapshot, self.laid, self.reach = state, True, step, step

    def rewound(self, step: int) -> "Past":
        """The same line up to frame `step`, as another one."""
        rows = () if self.actions is None else self.actions.rows[: max(0, step - self.reach)]
        actions = replace(self.actions, rows=rows) if self.actions is not None and rows else None
        return replace(self, reach=min(self.reach, step), position=step, actions=actions)
