"""An exchange: one turn of a conversation and what the client sees of it."""

from dataclasses import dataclass, field, replace

from omni_live.sessions.continuity import Message
from omni_live.sessions.inputs import Outcome, PlaybackAcked, RespondAsked
from omni_live.sessions.items import Item, Modality, Response, ResponseStatus
from omni_live.sessions.marks import Mark
from omni_live.sessions.payload import Payload
from omni_live.sessions.reply import Chunk, Reply
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.turn import Cue, TurnState

CONVERSATION_LANE = 0
TENTATIVE_LANES = (1, 2)
SIDE_LANE = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The stages and rates of a pipeline as a conversation needs them."""

    ears: str = "ears"
    """Empty where the pipeline hears nothing."""
    thinker: str = "thinker"
    voice: str = "code2wav"
    input_rate_hz: int = 16000
    output_rate_hz: int = 24000


@dataclass(slots=True)
class Exchange:
    """A turn and what the client sees of it."""

    lane: int
    stamp: Stamp
    response: Response
    reply: Reply
    options: RespondAsked
    state: TurnState = TurnState.LISTENING
    """LISTENING: the response was created, but transcripts are awaited before it can be thought about."""
    tentative: bool = False
    messages: tuple[Message, ...] = ()
    """What it was given; of a tentative turn with the user's message, which is not an item yet."""
    spoken: int = 0
    """Chunks that its final stage has sent."""
    since_ns: int = 0
    """When something of it came or went out last."""
    item: Item | None = None
    text: str = ""
    """Text turns: what was said so far; tentative text waits in `pending`."""
    pending: list[str] = field(default_factory=list)
    complete: bool = False
    """Every final output is finished; what waits in the reply is all there will be."""
    outcome: Outcome = Outcome.DONE
    reason: str = ""
    cut: bool = False
    """The client stopped playing it; what it says of the position may still come."""

    @property
    def audio(self) -> bool:
        return self.response.modality is Modality.AUDIO


@dataclass(frozen=True, slots=True)
class Awaited:
    """A committed user item whose transcript is still to come."""

    item_id: str
    utterance: int
    """0: committed by hand, as whichever utterance the ears make of it."""
    respond: bool | None
    """None leaves the settings to decide."""
    until_ns: int


def names(ack: PlaybackAcked, exchange: Exchange) -> bool:
    """Whether the acknowledgement is about this exchange; one that names nothing is about the latest."""
    if ack.response_id is not None:
        return ack.response_id == exchange.response.id
    if ack.item_id is not None:
        return exchange.item is not None and ack.item_id == exchange.item.id
    return exchange.audio and exchange.reply.started_ns is not None


STATUSES = {
    Cue.FINISHED: ResponseStatus.COMPLETED,
    Cue.CUT: ResponseStatus.CANCELLED,
    Cue.BROKE: ResponseStatus.FAILED,
    Cue.CUT_SHORT: ResponseStatus.INCOMPLETE,
}


def concluded(response: Response, cue: Cue, reason: str, item: Item | None) -> Response:
    """The response as its terminal event shows it."""
    if cue is Cue.BROKE:
        message = "The reply could not be completed."
        return replace(response, status=STATUSES[cue], item=item, error_code=reason, error_message=message)
    return replace(response, status=STATUSES[cue], item=item, reason="" if cue is Cue.FINISHED else reason)


def read_chunk(payload: Payload) -> Chunk:
    """A chunk of the voice stage.

    body: int16 PCM. meta: `text`, the transcript that begins in it; `marks`, flat (sample, char, sample, char, ...).
    """
    flat = payload.meta.get("marks") or ()
    pairs = flat if isinstance(flat, tuple) else ()
    marks = tuple(Mark(pairs[i], pairs[i + 1]) for i in range(0, len(pairs) - 1, 2))
    return Chunk(bytes(payload.body), str(payload.meta.get("text") or ""), marks)
