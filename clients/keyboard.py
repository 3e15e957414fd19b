"""A terminal as a game needs it: keys as they are pressed, and pictures in half blocks. Restored on every way out."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

READ_BYTES: Final = 1024
MAX_KEYS: Final = 64
"""Keys that wait. A key that repeats faster than it is used must not go on when it is let go."""

_ENTER: Final = "\033[?1049h\033[?25l\033[2J"  # another screen, no cursor, nothing on it
_LEAVE: Final = "\033[0m\033[?25h\033[?1049l"
_HOME: Final = "\033[H"
_ARROWS: Final = {"A": "up", "B": "down", "C": "right", "D": "left"}
_MOST_ESCAPE: Final = 8  # characters of a sequence that nobody knows


@dataclass(slots=True)
class KeyReader:
    """Makes names of keys out of what a terminal sends, however it is cut."""

    _rest: str = ""

    def feed(self, text: str) -> list[str]:
        """Names: a character, or up, down, left, right."""
        self._rest += text
        keys: list[str] = []
        while self._rest:
            key, used = _first(self._rest)
            if not used:
                break
            self._rest = self._rest[used:]
            if key:
                keys.append(key)
        return keys


def _first(text: str) -> tuple[str, int]:
    """The first key, and how many characters it is; 0 where more must come, and no key where it is none of ours."""
    if text[0] != "\033":
        return text[0], 1
    if len(text) == 1:
        return "", 0
    if text[1] not in "[O":
        return "", 1
    for at, character in enumerate(text[2:_MOST_ESCAPE], 2):
        if "@" <= character <= "~":
            return _ARROWS.get(character, ""), at + 1
    return "", _MOST_ESCAPE if len(text) >= _MOST_ESCAPE else 0


@contextlib.contextmanager
def keys_at_once(terminal: TextIO) -> Iterator[None]:
    """Keys come as they are pressed and are not shown; Ctrl-C still interrupts, Ctrl-Z does not stop."""
    descriptor = terminal.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        now = termios.tcgetattr(descriptor)
        now[6][termios.VSUSP] = b"\0"  # stopped, the terminal would be left as it is now
        termios.tcsetattr(descriptor, termios.TCSADRAIN, now)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def pressed(terminal: TextIO | None = None) -> AsyncGenerator[str, None]:
    """Keys until the terminal has no more. What is pressed too fast is dropped."""
    source = sys.stdin if terminal is None else terminal
    queue: asyncio.Queue[str | None] = asyncio.Queue(MAX_KEYS)
    reader, loop = KeyReader(), asyncio.get_running_loop()

    def readable() -> None:
        try:
            data = os.read(source.fileno(), READ_BYTES).decode(errors="replace")
        except OSError:  # the terminal has gone
            data = ""
        for key in reader.feed(data):
            if not queue.full():
                queue.put_nowait(key)
        if not data:
            loop.remove_reader(source.fileno())
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    loop.add_reader(source.fileno(), readable)
    try:
        while (key := await queue.get()) is not None:
            yield key
    finally:
        loop.remove_reader(source.fileno())


@dataclass(slots=True)
class Screen:
    """Shows pictures and a line of words on a terminal of 24-bit colours."""

    out: TextIO = field(default_factory=lambda: sys.stdout)

    def __enter__(self) -> "Screen":
        self.out.write(_ENTER)
        self.out.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self.out.write(_LEAVE)
        self.out.flush()

    def show(self, image: NDArray[np.uint8], words: str) -> None:
        """The picture uint8 (height, width, 3), two of its rows in a line of characters."""
        self.out.write(f"{_HOME}{half_blocks(image)}\033[K{words}\n\033[J")
        self.out.flush()


def half_blocks(image: NDArray[np.uint8]) -> str:
    """The picture as lines; an odd last row is left out."""
    lines = []
    for upper, lower in zip(image[0::2].tolist(), image[1::2].tolist(), strict=False):
        line, last = [], None
        for colours in zip(upper, lower, strict=True):
            if colours != last:
                (r, g, b), (u, v, w) = colours
                line.append(f"\033[38;2;{r};{g};{b}m\033[48;2;{u};{v};{w}m")
                last = colours
            line.append("▀")
        lines.append("".join(line) + "\033[0m\n")
    return "".join(lines)
