"""Conversations as token ids: SmolLM2's chat template, what of the KV stays when a conversation changes, and text out.

The template is ChatML: every item is `<|im_start|>role\\ntext<|im_end|>\\n`, and a reply is written after
`<|im_start|>assistant\\n`. Three rules hold here:

- A control token in somebody's text is text. Only this module writes control tokens.
- A finished reply keeps the ids it was generated as; encoding its text again could give others, and the KV after it
  would be lost. A reply that was cut to what the user heard is encoded from the cut text, so the model sees that text
  and nothing else.
- A conversation that no longer fits loses its oldest exchanges, down to half the window at once: cutting one exchange
  every turn would prefill everything else again every turn. What was dropped stays dropped.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from itertools import chain
from typing import Final

from tokenizers import Tokenizer

from omni_live.models.gguf_weights import ConversationTooLong, Misuse, WeightsUnusable

_FEWEST_TOKENS: Final = 5  # of an item: an empty one
_MOST_CHARACTERS: Final = 64  # of a token, with room to spare for all but runs of blanks


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing said in the conversation."""

    role: Role
    text: str


OPENING: Final = (
    Item(Role.SYSTEM, "You are a helpful voice assistant. Answer in one or two short sentences."),
    # A model of this size follows examples better than orders: without these it lectures, or takes the user's name.
    Item(Role.USER, "Hello, I just got home."),
    Item(Role.ASSISTANT, "Welcome home! How can I help you today?"),
    Item(Role.USER, "How many days are in a week?"),
    Item(Role.ASSISTANT, "There are seven days in a week."),
    Item(Role.USER, "Thanks."),
    Item(Role.ASSISTANT, "You're welcome!"),
)
"""What stands before a conversation that brings no system item of its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn feeds to the model.

    `ids` are the whole prompt; the KV's first `keep` tokens stand as they are, and `ids[keep:]` (never empty) is to be
    prefilled. `probe` is the index in `ids` of the last token of the user's text, if it will be prefilled: the logits
    after it tell how likely `<|im_end|>` is to follow. `dropped` counts the items left out for want of room.
    """

    ids: tuple[int, ...]
    keep: int
    dropped: int
    probe: int | None

    @property
    def fresh(self) -> tuple[int, ...]:
        return self.ids[self.keep :]


class Template:
    """SmolLM2's chat template over its tokenizer, piece by piece. Joining the pieces equals encoding the whole text,
    because the header's line feed is a token of its own unless the text after it begins with white space.

    `stops` end any reply; `spoken_stops` also end one at its first line feed, for replies that are spoken.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = self._control("<|im_start|>")
        self.end = self._control("<|im_end|>")
        self.stops = frozenset({self._start, self.end, self._control("<|endoftext|>")})
        self.spoken_stops = self.stops | self._line_feeds()
        self._headers = {role: (self._start, *self._encode(f"{role}\n")) for role in Role}
        self._tail = (self.end, *self._encode("\n"))

    def text_ids(self, item: Item) -> tuple[int, ...]:
        return self._encode(item.text)

    def wrapped(self, role: Role, text_ids: Sequence[int]) -> tuple[int, ...]:
        """A whole item around the ids of its text."""
        return (*self._headers[role], *text_ids, *self._tail)

    def after_text(self) -> int:
        """How many tokens of a prompt follow the last token of its newest item's text."""
        return len(self._tail) + len(self.reply_header)

    @property
    def reply_header(self) -> tuple[int, ...]:
        return self._headers[Role.ASSISTANT]

    def _line_feeds(self) -> set[int]:
        """Tokens of line feeds alone: what comes after one in a short answer is a signature or a list, not speech."""
        found = (self._tokenizer.token_to_id("Ċ" * count) for count in (1, 2, 3))  # byte 10's stand-in, see _BYTE_OF
        return {token for token in found if token is not None}

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _control(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise WeightsUnusable(f"the tokenizer has no {token}")
        return int(found)


@dataclass(frozen=True, slots=True)
class _Dropped:
    """The oldest `count` items are out; `digest` recognises them when the caller names them again."""

    count: int = 0
    digest: bytes = b""


class Context:
    """One session's conversation. `window` is the slot's size in tokens, `reserve` what is kept free for the reply.

    `opening` precedes the conversation unless its first item is a system item of its own.
    """

    def __init__(
        self, template: Template, *, window: int = 2048, reserve: int = 256, opening: Sequence[Item] = OPENING
    ) -> None:
        if not 0 < reserve < window:
            raise Misuse("the reserve is smaller than the window")
        self._template = template
        self._room = window - reserve
        self._spare = max(0, self._room - window // 2)  # freed beyond need: the next overflow is then far away
        self._most = window // _FEWEST_TOKENS + len(opening)
        self._opening = tuple(opening)
        self._ids: dict[Item, tuple[int, ...]] = {}  # ordered by last use; ids of the text alone
        self._dropped = _Dropped()

    def replied(self, text: str, ids: Sequence[int]) -> None:
        """Remembers the ids that a reply was generated as, without its stop token."""
        self._remember(Item(Role.ASSISTANT, text), tuple(ids))

    def opening_ids(self) -> tuple[int, ...]:
        """The ids that every prompt of this context begins with: what can be prefilled before anybody has spoken."""
        return tuple(token for item in self._opening for token in self._whole(item))

    def plan(self, items: Sequence[Item], held: Sequence[int]) -> Plan:
        """The prompt for a reply to `items`, given the ids that the KV `held`.

        Raises ConversationTooLong when the opening and the newest exchange alone do not fit.
        """
        opening, said = self._split(items)
        fixed = [token for item in opening for token in self._whole(item)]
        gone = self._still_dropped(said)
        wholes = [self._whole(item) for item in said[gone:]]
        room = self._room - len(fixed) - len(self._template.reply_header)
        if sum(map(len, wholes)) > room:
            more = self._surplus(said[gone:], wholes, room)
            wholes = wholes[more:]
            gone += more
        self._dropped = _Dropped(gone, _digest(said[:gone]))
        ids = (*fixed, *chain.from_iterable(wholes), *self._template.reply_header)
        keep = min(common_prefix(held, ids), len(ids) - 1)
        probe = len(ids) - self._template.after_text() - 1
        probed = bool(said) and said[-1].role is Role.USER and probe >= keep
        return Plan(ids, keep, gone, probe if probed else None)

    def _split(self, items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
        if items and items[0].role is Role.SYSTEM:
            return items[:1], items[1:]
        return self._opening, items

    def _still_dropped(self, said: Sequence[Item]) -> int:
        known = self._dropped
        same = known.count < len(said) and _digest(said[: known.count]) == known.digest
        return known.count if same else 0  # else the caller forgot them too, or this is another conversation

    def _surplus(self, said: Sequence[Item], wholes: Sequence[Sequence[int]], room: int) -> int:
        """How many of the oldest items to drop, up to a user's item: to half the window, or all but the newest."""
        starts = [index for index, item in enumerate(said) if index and item.role is Role.USER]
        left = [sum(map(len, wholes[start:])) for start in starts]
        for start, size in zip(starts, left, strict=True):
            if size <= room - self._spare:
                return start
        if not starts or left[-1] > room:
            raise ConversationTooLong("the newest exchange does not fit the model's context")
        return starts[-1]

    def _whole(self, item: Item) -> tuple[int, ...]:
        ids = self._ids.get(item)
        if ids is None:
            if len(item.text) > self._room * _MOST_CHARACTERS:  # encoding it would hold up everyone else's step
                raise ConversationTooLong("an item does not fit the model's context")
            ids = self._template.text_ids(item)
        self._remember(item, ids)
        return self._template.wrapped(item.role, ids)

    def _remember(self, item: Item, ids: tuple[int, ...]) -> None:
        self._ids.pop(item, None)
        self._ids[item] = ids
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]


def _digest(items: Sequence[Item]) -> bytes:
    state = sha256()
    for item in items:
        text = item.text.encode("utf-8", "surrogatepass")
        state.update(f"{item.role}:{len(text)}:".encode())
        state.update(text)
    return state.digest()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a reply's text; `start` and `stop` are its character offsets in the reply."""

    text: str
    start: int
    stop: int


class Detokenizer:
    """Turns ids into text as they come. A character whose bytes are spread over several tokens comes out whole, with
    the last of them; bytes that are no UTF-8 become U+FFFD, as in `bytes.decode`. Control tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._controls = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._at = 0

    def push(self, token: int) -> Piece:
        """The text that one more id completes, possibly none."""
        return self._piece(self._decoder.decode(self._bytes(token)))

    def flush(self) -> Piece:
        """What is left when no more ids come: U+FFFD for half a character, mostly nothing."""
        return self._piece(self._decoder.decode(b"", final=True))

    def _piece(self, text: str) -> Piece:
        start, self._at = self._at, self._at + len(text)
        return Piece(text, start, self._at)

    def _bytes(self, token: int) -> bytes:
        if token in self._controls:
            return b""
        shown = self._tokenizer.id_to_token(token)
        if shown is None:
            raise Misuse("an id is outside the vocabulary")
        return bytes(_BYTE_OF[character] for character in shown)


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, read backwards (its `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF: Final = _byte_table()
