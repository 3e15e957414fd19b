"""`talk` through a sound card: a virtual one, made of PulseAudio's null sinks, which PortAudio reaches through ALSA.

What is played into the sink `user` is what the microphone takes; what the loudspeaker gives is recorded from the
monitor of the sink `speaker`. The daemon is the test's own, in a folder of its own. The server is a scripted one that
tells speech from silence by its energy; what it answers is a tone.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_live.clients import soundcard, talk
from omni_live.clients.converse import load_utterance
from omni_live.clients.playback import Player, silences

VOICES = Path(__file__).parents[1] / "data" / "voice"
QUESTION, STORY, INTERRUPTION = VOICES / "00_kokf.wav", VOICES / "01_kokm.wav", VOICES / "06_kokf.wav"
PACKAGES = "pulseaudio pulseaudio-utils libportaudio2 libasound2-plugins"
HEARD_HZ, SPOKEN_HZ = 16_000, 24_000
TONE = 6000
"""Amplitude of the scripted answer."""

CONFIG = """
load-module module-native-protocol-unix auth-anonymous=1 socket={socket}
load-module module-null-sink sink_name=speaker rate=24000 channels=1
load-module module-null-sink sink_name=user rate=16000 channels=1
set-default-sink speaker
set-default-source user.monitor
"""
ALSA = """
pcm.!default {{ type pulse server "unix:{socket}" }}
ctl.!default {{ type pulse server "unix:{socket}" }}
"""


class VirtualCard:
    """A running sound server; `environment` leads a process to it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    async def say(self, path: Path) -> None:
        """Speak a recording into the microphone; returns when it is spoken."""
        pcm = load_utterance(path, HEARD_HZ).pcm.tobytes()
        command = ["pacat", "--device=user", *_format(HEARD_HZ)]
        speaking = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, env=self.environment)
        await speaking.communicate(pcm)
        assert speaking.returncode == 0

    @contextlib.contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        with path.open("wb") as out:
            command = ["parec", "--device=speaker.monitor", *_format(SPOKEN_HZ)]
            recorder = subprocess.Popen(command, stdout=out, env=self.environment)
            try:
                yield
            finally:
                recorder.terminate()
                recorder.wait(10)


def _format(rate_hz: int) -> list[str]:
    return [f"--rate={rate_hz}", "--channels=1", "--format=s16le", "--latency-msec=20"]


@pytest.fixture(scope="module")
def virtual_card(tmp_path_factory) -> Iterator[VirtualCard]:
    missing = [name for name in ("pulseaudio", "pactl", "pacat", "parec") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"{', '.join(missing)} missing; the sound tests need: apt-get install -y {PACKAGES}")
    folder = tmp_path_factory.mktemp("pulse")
    socket = folder / "native"
    (folder / "asound.conf").write_text(ALSA.format(socket=socket))
    (folder / "config.pa").write_text(CONFIG.format(socket=socket))
    (folder / "run").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "PULSE_SERVER": f"unix:{socket}",
        "PULSE_COOKIE": str(folder / "cookie"),
        "ALSA_CONFIG_PATH": str(folder / "asound.conf"),
    }
    options = ["--daemonize=no", "--exit-idle-time=-1", "--use-pid-file=no", "--disable-shm=yes"]
    options += ["--realtime=no", "--high-priority=no", "--log-target=stderr"]
    with (folder / "log").open("w") as log:
        command = ["pulseaudio", "-n", *options, "-F", str(folder / "config.pa")]
        daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _await_daemon(daemon, environment, folder / "log")
        yield VirtualCard(environment)
    finally:
        daemon.terminate()
        daemon.wait(10)


def _await_daemon(daemon: subprocess.Popen, environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + 20
    while subprocess.run(["pactl", "info"], env=environment, capture_output=True, check=False).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"PulseAudio does not start:\n{log.read_text()}")
        time.sleep(0.05)


class ToneServer:
    """Answers speech with a long tone, and stops it when there is speech again. Scripted; there is no model in it."""

    SPEECH_RMS = 500
    TURN_MS = 500

    def __init__(self, server) -> None:
        self.server = server
        self.replies = 0
        self.stopped: list[str] = []
        self.played: dict[str, float] = {}
        self._speech_ms = 0
        self._silence_ms = 0
        self._speaking: asyncio.Task | None = None
        server.answer = self.take

    async def take(self, event: dict) -> None:
        if event["type"] == "playback.ack":
            self.played[event["response_id"]] = event["played_ms"]
        if event["type"] != "input_audio_buffer.append":
            return
        pcm = np.frombuffer(event["audio"], np.int16).astype(float)
        length_ms = len(pcm) * 1000 / HEARD_HZ
        if np.sqrt(np.mean(pcm**2)) > self.SPEECH_RMS:
            self._speech_ms += length_ms
            self._silence_ms = 0
        else:
            self._silence_ms += length_ms
        await self._decide()

    async def _decide(self) -> None:
        if self._speaking is not None and self._speech_ms >= 200:
            self._speaking.cancel()
            self._speaking = None
            response_id = f"r{self.replies}"
            self.stopped.append(response_id)
            await self.server.say("overlap.decision", action="barge_in", reason="speech", response_id=response_id)
            await self._done("cancelled")
        elif self._speaking is None and self._speech_ms >= 200 and self._silence_ms >= self.TURN_MS:
            await self._answer()

    async def _answer(self) -> None:
        self._speech_ms = 0
        self.replies += 1
        item = f"user_{self.replies}"
        await self.server.say("input_audio_buffer.speech_started", item_id=item, audio_start_ms=0)
        await self.server.say("input_audio_buffer.committed", item_id=item)
        await self.server.say(
            "conversation.item.input_audio_transcription.completed",
            item_id=item,
            transcript=f"utterance {self.replies}",
        )
        await self.server.say("response.created", response={"id": f"r{self.replies}"})
        if self.replies == 1:
            self._speaking = asyncio.create_task(self._tone())
        else:
            await self._done("completed")

    async def _tone(self) -> None:
        """20 s of a tone, 250 ms at a time and 750 ms ahead."""
        at = np.arange(SPOKEN_HZ * 20)
        pcm = (TONE * np.sin(2 * np.pi * 500 * at / SPOKEN_HZ)).astype("<i2")
        piece = SPOKEN_HZ // 4
        for start in range(0, len(pcm), piece):
            await self.server.sound("r1", pcm[start : start + piece].tobytes(), start)
            await asyncio.sleep(0.25 if start >= 3 * piece else 0)

    async def _done(self, status: str) -> None:
        await self.server.say("response.done", response={"id": f"r{self.replies}", "status": status})


TALK = """
import argparse, sys
from omni_live.clients import talk
parser = argparse.ArgumentParser()
talk.add_arguments(parser)
sys.exit(talk.run(parser.parse_args()))
"""


async def _talk(card: VirtualCard, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-c", TALK, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return await asyncio.create_subprocess_exec(*command, env=card.environment, **pipes)


@pytest.mark.parametrize("echo", ["--headset", ""])
async def test_a_reply_is_heard_on_the_loudspeaker_and_stops_when_the_user_interrupts(
    virtual_card, server, tmp_path: Path, echo: str
) -> None:
    scripted = ToneServer(server)
    with virtual_card.recording(tmp_path / "heard"):
        talking = await _talk(virtual_card, "--url", server.url, "--json", *filter(None, [echo]))
        try:
            await _until(server, talking, server.sound_taken)
            await virtual_card.say(QUESTION)
            await _until(server, talking, lambda: scripted.played.get("r1", 0) > 1500)
            await virtual_card.say(INTERRUPTION)
            await _until(server, talking, lambda: scripted.replies == 2)
            taken = len(server.sound_taken())
            await _until(server, talking, lambda: len(server.sound_taken()) > taken + HEARD_HZ * 2)  # one second
            talking.send_signal(signal.SIGINT)
            out, errors = await asyncio.wait_for(talking.communicate(), 20)
        finally:
            if talking.returncode is None:
                talking.kill()
    assert talking.returncode == 0, errors.decode()
    turns = [json.loads(line) for line in out.decode().splitlines()]
    assert [turn["heard"] for turn in turns] == ["utterance 1", "utterance 2"]
    assert turns[0]["replies"][0]["status"] == "cancelled"
    assert scripted.stopped == ["r1"]
    assert server.taken[-1]["type"] == "session.close"
    _assert_heard(tmp_path / "heard", scripted.played["r1"])


@pytest.fixture
def voice_server(tmp_path: Path) -> Iterator[str]:
    """The real server with its models; gives the endpoint's address."""
    ready, log = tmp_path / "port", tmp_path / "server"
    command = [sys.executable, "-m", "omni_live", "serve", "--pipeline", "voice", "--port", "0"]
    with log.open("w") as out:
        serving = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 180
        while not ready.exists() or not ready.read_text().strip():
            if serving.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server does not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{ready.read_text().strip()}/v1/duplex"
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.wait(60)


async def test_the_real_server_answers_and_falls_silent_when_it_is_interrupted(
    virtual_card, voice_server: str, tmp_path: Path
) -> None:
    recorded = tmp_path / "heard"
    with virtual_card.recording(recorded):
        talking = await _talk(virtual_card, "--url", voice_server, "--json", "--headset")
        try:
            async with asyncio.timeout(120):
                assert await talking.stderr.readline() == b"Talk. Ctrl-C ends the conversation.\n"
                await virtual_card.say(STORY)
                await _sounds_for(recorded, 600)
                await virtual_card.say(INTERRUPTION)
                turns = [json.loads(await talking.stdout.readline()) for _ in range(2)]
                talking.send_signal(signal.SIGINT)
                _, errors = await talking.communicate()
        finally:
            if talking.returncode is None:
                talking.kill()
    assert talking.returncode == 0, errors.decode()
    assert "robot" in turns[0]["heard"].lower(), json.dumps(turns)
    assert "stop" in turns[1]["heard"].lower()
    assert turns[0]["interrupted"]
    assert turns[1]["answered"]
    silent = [(start, length) for start, length in silences(_recorded(recorded), SPOKEN_HZ, 700) if start > 0]
    assert silent, "the reply was not silenced by the interruption"


async def _sounds_for(recorded: Path, ms: int) -> None:
    """Waits until so much sound was recorded."""
    while np.count_nonzero(np.abs(_recorded(recorded).astype(int)) > 300) < ms * SPOKEN_HZ // 2000:
        await asyncio.sleep(0.05)


def _recorded(path: Path) -> np.ndarray:
    data = path.read_bytes()
    return np.frombuffer(data[: len(data) // 2 * 2], "<i2")


async def _until(server, talking: asyncio.subprocess.Process, true) -> None:
    """Waits for the server's state, or for the end of a client that should not end."""
    waiting = asyncio.create_task(server.until(true, within_s=60))
    ended = asyncio.create_task(talking.wait())
    await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not waiting.done():
        waiting.cancel()
        pytest.fail((await talking.stderr.read()).decode())
    waiting.result()


def _assert_heard(path: Path, played_ms: float) -> None:
    """The recording holds the tone, as long as the client says that it was played, and then silence."""
    pcm = np.fromfile(path, "<i2").astype(float)
    window = SPOKEN_HZ // 100
    levels = np.sqrt(np.mean(pcm[: len(pcm) // window * window].reshape(-1, window) ** 2, axis=1))
    loud = np.flatnonzero(levels > TONE / 4)
    assert len(loud), "nothing was heard on the loudspeaker"
    heard_ms = len(loud) * 10
    assert levels[loud].mean() == pytest.approx(TONE / np.sqrt(2), rel=0.1)
    assert heard_ms == pytest.approx(played_ms, abs=250)
    assert 1500 < heard_ms < 12_000
    assert len(levels) - loud[-1] > 70, "the reply went on after the interruption"


async def test_the_devices_of_the_card_are_listed(virtual_card) -> None:
    listing = await _talk(virtual_card, "--list-devices")
    out, errors = await listing.communicate()
    assert listing.returncode == 0, errors.decode()
    assert "default, ALSA" in out.decode()


async def test_a_device_that_is_not_there_is_named(virtual_card) -> None:
    talking = await _talk(virtual_card, "--input-device", "Theremin", "--url", "ws://127.0.0.1:1/")
    _, errors = await talking.communicate()
    assert talking.returncode == 1
    assert "no microphone can be opened (not 'Theremin')" in errors.decode()
    assert "Traceback" not in errors.decode()


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    talk.add_arguments(parser)
    return talk.run(parser.parse_args(arguments))


def test_a_missing_package_is_a_sentence_with_the_cure(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert _run("--list-devices") == 1
    assert "pip install 'omni-live[audio]'" in capsys.readouterr().err


def test_a_missing_portaudio_is_a_sentence_with_the_cure(monkeypatch, capsys, tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')\n")
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert _run("--list-devices") == 1
    assert "apt-get install libportaudio2" in capsys.readouterr().err


def test_a_machine_without_a_card_is_told_to_use_files(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", NoDevices())
    assert _run("--list-devices") == 1
    assert "--in and --out" in capsys.readouterr().err
    assert _run() == 1
    assert "no microphone can be opened (no default one): Error querying device -1" in capsys.readouterr().err


# -- the card's callbacks, without a card ----------------------------------------------------------------------------


class FakeStream:
    latency = 0.05

    def __init__(self, **settings) -> None:
        self.settings = settings
        self.running = False

    def start(self) -> None:
        self.running = True

    def close(self, ignore_errors: bool) -> None:
        self.running = False


class FakeSoundDevice:
    """sounddevice's interface as far as the client uses it. Takes only 48 kHz stereo."""

    class PortAudioError(Exception):
        pass

    RawInputStream = RawOutputStream = FakeStream

    def check_input_settings(self, *, device, channels, dtype, samplerate) -> None:
        if (channels, samplerate) != (2, 48_000):
            raise self.PortAudioError("Invalid sample rate")

    check_output_settings = check_input_settings


class NoDevices(FakeSoundDevice):
    def query_devices(self) -> str:
        return ""

    def check_input_settings(self, **_) -> None:
        raise self.PortAudioError("Error querying device -1")


class _Status:
    input_overflow = output_underflow = True


class _Times:
    outputBufferDacTime, currentTime = 5.0, 4.9  # noqa: N815  # PortAudio's names


@pytest.fixture
def fake_device(monkeypatch) -> FakeSoundDevice:
    device = FakeSoundDevice()
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    return device


async def test_a_card_that_takes_only_another_rate_and_two_channels_is_used_that_way(fake_device) -> None:
    microphone, loudspeaker = soundcard.microphone_side(None), soundcard.loudspeaker_side(3)
    assert (microphone.rate_hz, microphone.channels, microphone.block) == (48_000, 2, 960)
    player = Player(48_000, depth_ms=0)
    with soundcard.SoundCard(microphone, loudspeaker, player) as card:
        taking, giving = card._streams
        assert (giving.settings["device"], giving.settings["channels"], giving.running) == (3, 2, True)
        stereo = np.stack([np.arange(960), np.zeros(960)], 1).astype(np.int16)
        taking.settings["callback"](stereo.tobytes(), 960, _Times, _Status)
        block = await anext(card.blocks())
        out = bytearray(960 * 4)
        giving.settings["callback"](out, 960, _Times, _Status)
        assert (card.overflows, card.underflows) == (1, 1)
    assert list(block) == list(range(960))
    assert out == bytes(960 * 4)
    assert player.timeline == 960
    assert not taking.running
    assert not giving.running


async def test_a_microphone_that_nobody_reads_drops_its_oldest_blocks_and_counts_them(fake_device) -> None:
    side = soundcard.microphone_side(None)
    with soundcard.SoundCard(side, side, Player(48_000)) as card:
        for number in range(soundcard.WAITING_BLOCKS + 5):
            card._take(np.full(960, number, np.int16))
        first = await anext(card.blocks())
        assert card.dropped == 5
        assert first[0] == 5


async def test_a_device_that_goes_away_ends_the_conversation_with_a_sentence(fake_device) -> None:
    side = soundcard.microphone_side(None)
    with soundcard.SoundCard(side, side, Player(48_000)) as card:
        card._on_finished()
        with pytest.raises(soundcard.NoSound, match="gone"):
            await anext(card.blocks())
