"""A microphone and a loudspeaker through sounddevice (PortAudio).

They are two streams: one for both makes PortAudio's ALSA backend lose blocks where the two run on different clocks, as
they do on most machines. Each works in blocks of 20 ms at a rate that its device takes; the server converts.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from omni_live.clients.clock import S
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import BLOCK_MS, Player

LATENCY_S = 0.06
"""Asked of the device, each way: under it, sound servers on busy machines leave gaps."""
WAITING_BLOCKS = 100
"""Blocks of the microphone waiting to be taken. Reached: the oldest goes, and is counted."""
HEARS_HZ = (16_000, 24_000, 48_000, 32_000, 44_100)
SPEAKS_HZ = (24_000, 48_000, 16_000, 32_000, 44_100)
"""Rates to try, in this order; the server takes them all."""

Device = int | str | None
"""PortAudio's number of a device, a part of its name, or None for the default."""


class NoSound(Exception):
    """There is no usable sound device; the text says what to do."""


def _sounddevice() -> ModuleType:
    """Imported only here: a client that does not talk needs neither the package nor PortAudio."""
    try:
        import sounddevice
    except ModuleNotFoundError as error:
        raise NoSound(
            "talking needs the Python package sounddevice: pip install 'omni-live[audio]'. "
            "Without a sound card, use --in and --out with wav files."
        ) from error
    except OSError as error:
        raise NoSound(
            "talking needs the PortAudio library: apt-get install libportaudio2 (macOS: brew install portaudio). "
            "Without a sound card, use --in and --out with wav files."
        ) from error
    module: ModuleType = sounddevice
    return module


def parse_device(text: str | None) -> Device:
    """A device as a user names it."""
    return int(text) if text is not None and text.isdigit() else text


def devices() -> str:
    """A table of the sound devices; raises NoSound."""
    table = str(_sounddevice().query_devices())
    if not table.strip():
        raise NoSound("PortAudio finds no sound devices on this machine; use --in and --out with wav files")
    return table


@dataclass(frozen=True, slots=True)
class Side:
    """A device and how it is to be opened."""

    device: Device
    rate_hz: int
    channels: int

    @property
    def block(self) -> int:
        """Frames in 20 ms."""
        return self.rate_hz * BLOCK_MS // 1000


def microphone_side(device: Device) -> Side:
    """How to open a microphone; raises NoSound."""
    sounddevice = _sounddevice()
    return _side(device, HEARS_HZ, sounddevice.check_input_settings, sounddevice.PortAudioError, "microphone")


def loudspeaker_side(device: Device) -> Side:
    """How to open a loudspeaker; raises NoSound."""
    sounddevice = _sounddevice()
    return _side(device, SPEAKS_HZ, sounddevice.check_output_settings, sounddevice.PortAudioError, "loudspeaker")


def _side(
    device: Device, rates_hz: tuple[int, ...], check: Callable[..., None], refusal: type[Exception], what: str
) -> Side:
    why: Exception | None = None
    for channels in (1, 2):
        for rate_hz in rates_hz:
            try:
                check(device=device, channels=channels, dtype="int16", samplerate=rate_hz)
            except (refusal, ValueError) as error:  # ValueError: no such device, or several
                why = error
            else:
                return Side(device, rate_hz, channels)
    wanted = "no default one" if device is None else f"not {device!r}"
    raise NoSound(f"no {what} can be opened ({wanted}): {why}; --list-devices shows what is there") from why


class SoundCard:
    """Two open streams; use it with `with`, inside a running event loop.

    `tap` gets each block given to the loudspeaker, on the card's thread.
    """

    def __init__(
        self, microphone: Side, loudspeaker: Side, player: Player, tap: Callable[[Pcm], None] | None = None
    ) -> None:
        self.dropped = 0
        """Blocks of the microphone that nobody took in time."""
        self.overflows = 0
        """How often the device lost sound on its way in."""
        self.underflows = 0
        """How often the device had nothing to play, silence included: the machine was too slow."""
        self._player = player
        self._tap = tap
        self._channels = (microphone.channels, loudspeaker.channels)
        self._loop = asyncio.get_running_loop()
        self._blocks: deque[Pcm] = deque()
        self._arrived = asyncio.Event()
        self._gone = False
        self._refusal, self._streams = self._open(microphone, loudspeaker)

    def _open(self, microphone: Side, loudspeaker: Side) -> tuple[type[Exception], tuple[Any, Any]]:
        sounddevice = _sounddevice()
        refusal: type[Exception] = sounddevice.PortAudioError
        try:
            taking = sounddevice.RawInputStream(
                **_settings(microphone), callback=self._on_taken, finished_callback=self._on_finished
            )
            giving = sounddevice.RawOutputStream(
                **_settings(loudspeaker), callback=self._on_wanted, finished_callback=self._on_finished
            )
        except refusal as error:
            raise NoSound(f"the sound device cannot be opened: {error}") from error
        return refusal, (taking, giving)

    def __enter__(self) -> "SoundCard":
        taking, giving = self._streams
        try:
            giving.start()
            taking.start()
        except self._refusal as error:
            raise NoSound(f"the sound device does not start: {error}") from error
        self._player.latency(giving.latency * 1000)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close(ignore_errors=True)

    async def blocks(self) -> AsyncIterator[Pcm]:
        """What the microphone takes; raises NoSound when a device goes away."""
        while True:
            while self._blocks:
                yield self._blocks.popleft()
            if self._gone:
                raise NoSound("the sound device is gone")
            self._arrived.clear()
            await self._arrived.wait()

    # -- on PortAudio's threads ----------------------------------------------------------------------------------

    def _on_taken(self, block: Any, frames: int, times: Any, status: Any) -> None:
        if status.input_overflow:
            self.overflows += 1
        pcm = np.frombuffer(bytes(block), np.int16)
        self._loop.call_soon_threadsafe(self._take, pcm[:: self._channels[0]])

    def _on_wanted(self, block: Any, frames: int, times: Any, status: Any) -> None:
        if status.output_underflow:
            self.underflows += 1
        ahead_ns = max(0, round((times.outputBufferDacTime - times.currentTime) * S))
        pcm = self._player.pull(frames, time.monotonic_ns() + ahead_ns)
        if self._tap is not None:
            self._tap(pcm)
        block[:] = np.repeat(pcm, self._channels[1]).tobytes()

    def _on_finished(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish)

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _take(self, pcm: Pcm) -> None:
        if len(self._blocks) >= WAITING_BLOCKS:
            self._blocks.popleft()
            self.dropped += 1
        self._blocks.append(pcm)
        self._arrived.set()

    def _finish(self) -> None:
        self._gone = True
        self._arrived.set()


def _settings(side: Side) -> dict[str, object]:
    return {
        "device": side.device,
        "samplerate": side.rate_hz,
        "channels": side.channels,
        "dtype": "int16",
        "blocksize": side.block,
        "latency": LATENCY_S,
    }
