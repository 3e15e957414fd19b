"""What users of vllm-omni's DuplexClient write: `SCENE URL RECORDING...` prints what came of it as JSON.

test_vllm_omni_duplex.py runs it in a process of its own. The client is as vllm-omni ships it. Only its modules are
loaded: the package's own `__init__` sets up its server, which needs vLLM.
"""

import asyncio
import base64
import contextlib
import importlib.util
import json
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import websockets

_spec = importlib.util.find_spec("vllm_omni")
assert _spec is not None and _spec.submodule_search_locations is not None
_package = types.ModuleType("vllm_omni")
_package.__path__ = list(_spec.submodule_search_locations)
sys.modules["vllm_omni"] = _package

from vllm_omni.clients import minicpmo_4_5, nemotron_voicechat, personaplex  # noqa: E402
from vllm_omni.clients.duplex import (  # noqa: E402
    DuplexClient,
    DuplexProtocolError,
    ReconnectPolicy,
    ResponseHandle,
    SessionConfig,
    read_pcm16_wav,
)

SOON_S = 60.0
VOICE = "heart-low"
LISTENS = {"type": "server_vad"}
PACED = {"max_output_tokens": 20, "omni_live": {"lead_ms": 200}}
"""A short reply that is sent hardly faster than it is played, so that a socket can drop in the middle of it."""

Scene = Callable[[str, Sequence[bytes]], Awaitable[object]]


class Sockets:
    """Where the client gets its sockets from, so that they can be dropped."""

    def __init__(self) -> None:
        self.opened: list[websockets.ClientConnection] = []

    async def __call__(self, url: str) -> websockets.ClientConnection:
        self.opened.append(await websockets.connect(url, max_size=64 << 20))
        return self.opened[-1]

    async def drop(self, client: DuplexClient) -> None:
        """The latest socket is gone without a word, and the client comes back by itself."""
        back = await waiting(client, "connection.resumed")
        self.opened[-1].transport.abort()
        await back


@contextlib.asynccontextmanager
async def talking(
    url: str, config: SessionConfig | None = None, sockets: Sockets | None = None
) -> AsyncIterator[tuple[DuplexClient, list[dict[str, Any]]]]:
    """A client and what the server tells it, which the client's own iterators see as well."""
    at_once = ReconnectPolicy(backoff_s=(0.01, 0.1))
    async with DuplexClient(url, model="voice", config=config, reconnect=at_once, connect=sockets) as client:
        told: list[dict[str, Any]] = []
        watching = asyncio.create_task(watch(client, told))
        await asyncio.sleep(0)  # it listens from here on
        yield client, told
    async with asyncio.timeout(SOON_S):
        await watching


async def watch(client: DuplexClient, told: list[dict[str, Any]]) -> None:
    told.extend([event.raw async for event in client.events()])


async def waiting(client: DuplexClient, what: str) -> asyncio.Task[Any]:
    """Waits, from now on, for the next event of this type."""
    task = asyncio.create_task(client.wait_for(what, timeout_s=SOON_S))
    await asyncio.sleep(0)
    return task


async def ask(client: DuplexClient, answer: str, kind: str, **fields: Any) -> dict[str, Any]:
    """Send an event and wait for the one that answers it."""
    told = await waiting(client, answer)
    await client.send({"type": kind, **fields})
    raw: dict[str, Any] = (await told).raw
    return raw


async def update(client: DuplexClient, session: dict[str, Any]) -> None:
    await ask(client, "session.updated", "session.update", session=session)


async def answered(client: DuplexClient) -> ResponseHandle:
    """The next response, as soon as it has something to say. Raises DuplexProtocolError where there is an error."""
    async with asyncio.timeout(SOON_S):
        async for response in client.responses():
            return response
    raise AssertionError("the session ended before its reply")


async def heard_out(client: DuplexClient, response: ResponseHandle) -> dict[str, Any]:
    """The whole of a reply; each piece is played, and acknowledged, at once."""
    sound = b""
    async with asyncio.timeout(SOON_S):
        async for chunk in response.audio():
            sound += chunk
            await client.ack_playback(response.played_ms, response_id=response.response_id)
        await response.wait()
    return report(response, sound)


def report(response: ResponseHandle, sound: bytes = b"") -> dict[str, Any]:
    done = response.done_event
    assert done is not None
    return {
        "decision": response.decision,
        "id": response.response_id,
        "transcript": response.transcript,
        "text": response.text,
        "played_ms": response.played_ms,
        "response": done.raw["response"],
        "sound": base64.b64encode(sound).decode(),
    }


# -- scenes ------------------------------------------------------------------------------------------------------


async def turns(url: str, recordings: Sequence[bytes]) -> object:
    """Turns that the client ends by hand, which is what its configuration says where nothing else is said."""
    replies = []
    async with talking(url) as (client, told):
        for pcm in recordings:
            await client.stream_pcm(pcm, realtime=False)
            await client.commit()
            replies.append(await heard_out(client, await answered(client)))
    return {"replies": replies, "told": told}


async def hands_free(url: str, recordings: Sequence[bytes]) -> object:
    """Turns that the server finds by itself, spoken in real time."""
    replies = []
    async with talking(url, SessionConfig(turn_detection=LISTENS)) as (client, told):
        for pcm in recordings:
            await client.stream_pcm(pcm)
            replies.append(await heard_out(client, await answered(client)))
    return {"replies": replies, "told": told}


async def barge_in(url: str, recordings: Sequence[bytes]) -> object:
    """The user speaks into a reply of which a second has been played."""
    question, stop = recordings
    async with talking(url, SessionConfig(turn_detection=LISTENS)) as (client, told):
        await update(client, {"omni_live": {"lead_ms": 400}})
        await client.stream_pcm(question, realtime=False)
        response = await answered(client)
        async for _ in response.audio():
            await client.ack_playback(min(response.played_ms, 1000), response_id=response.response_id)
            if response.played_ms >= 1000:
                break
        await client.stream_pcm(stop)
        await response.wait(SOON_S)
        cut = report(response)
        item = cut["response"]["output"][0]["id"]
        kept = await ask(client, "conversation.item.retrieved", "conversation.item.retrieve", item_id=item)
        reply = await heard_out(client, await answered(client))
    return {"cut": cut, "kept": kept["item"], "reply": reply, "told": told}


async def cancel(url: str, recordings: Sequence[bytes]) -> object:
    """The client takes its question back, asks another, and cancels where nothing is left to cancel."""
    async with talking(url) as (client, told):
        await client.stream_pcm(recordings[0], realtime=False)
        await client.commit()
        response = await answered(client)
        await client.cancel_response(response.response_id)
        await client.clear_input()
        await response.wait(SOON_S)
        cancelled = report(response)
        await client.stream_pcm(recordings[1], realtime=False)
        await client.commit()
        reply = await heard_out(client, await answered(client))
        await client.cancel_response()
        error = await refused(answered(client))
    return {"cancelled": cancelled, "reply": reply, "error": error, "told": told}


async def undisturbed(url: str, recordings: Sequence[bytes]) -> object:
    """Two turns with a socket that holds."""
    return await _over(url, recordings, ())


async def dropped(url: str, recordings: Sequence[bytes]) -> object:
    """The same, and the socket drops while the user speaks, at the first sound, and while the reply plays."""
    return await _over(url, recordings, (1, 60_000, 120_000))


async def _over(url: str, recordings: Sequence[bytes], drops: Sequence[int]) -> object:
    """`drops`: the bytes of the first reply's sound at which the socket is gone."""
    said, after = recordings
    sockets = Sockets()
    async with talking(url, sockets=sockets) as (client, told):
        await update(client, PACED)
        half = len(said) // 4 * 2
        await client.stream_pcm(said[:half], realtime=False)
        # The client numbers no input, so that a drop costs what is on its way: let this much arrive.
        await ask(client, "session.heartbeat_ack", "session.heartbeat")
        if drops:
            await sockets.drop(client)
        await client.stream_pcm(said[half:], realtime=False)
        await client.commit()
        response = await answered(client)
        sound, left = b"", list(drops)
        async with asyncio.timeout(SOON_S):
            async for chunk in response.audio():
                sound += chunk
                if left and len(sound) >= left[0]:
                    left.pop(0)
                    await sockets.drop(client)
            await response.wait()
        await client.ack_playback(response.played_ms, response_id=response.response_id)
        replies = [report(response, sound)]
        await client.stream_pcm(after, realtime=False)
        await client.commit()
        replies.append(await heard_out(client, await answered(client)))
    return {"replies": replies, "told": told, "sockets": len(sockets.opened)}


async def presets(url: str, recordings: Sequence[bytes]) -> object:
    """The session configurations that vllm-omni ships for its models, each through a turn."""
    configs = {
        "minicpmo_4_5": minicpmo_4_5.create_duplex_session_config(),
        "nemotron_voicechat": nemotron_voicechat.create_duplex_session_config(instructions="Be brief."),
        "personaplex": personaplex.create_duplex_session_config(voice=VOICE, persona="Be brief."),
    }
    found = {}
    for name, config in configs.items():
        async with talking(url, config) as (client, told):
            await client.stream_pcm(_coded(recordings[0], config), realtime=False)
            await client.commit()
            found[name] = {"reply": await heard_out(client, await answered(client)), "told": told}
    return found


def _coded(pcm16: bytes, config: SessionConfig) -> bytes:
    heard = np.frombuffer(pcm16, "<i2").astype(np.float32) / 32768
    heard = soxr.resample(heard, 16_000, config.input_audio.sample_rate_hz)
    if config.input_audio.encoding == "pcm_f32le":
        return bytes(heard.astype("<f4").tobytes())
    return bytes((heard * 32767).astype("<i2").tobytes())


async def errors(url: str, recordings: Sequence[bytes]) -> object:
    """What the server refuses, and that the session goes on where there is one."""
    found: dict[str, Any] = {}
    async with talking(url) as (client, _):
        await client.commit()
        found["empty"] = await refused(answered(client))
        await client.append_audio(recordings[0][:6400], video_frames=["data:image/jpeg;base64,AAAA"])
        found["video"] = await refused(answered(client))
        await client.stream_pcm(recordings[0], realtime=False)
        await client.commit()
        found["reply"] = await heard_out(client, await answered(client))
    client = DuplexClient(url, model="nobody")
    found["model"] = await refused(client.__aenter__())
    return found


async def refused(asked: Awaitable[object]) -> str | None:
    """The code of the error that the client raises."""
    try:
        await asked
    except DuplexProtocolError as error:
        return str(error.code)
    return None


async def breaks(url: str, recordings: Sequence[bytes]) -> object:
    """The application fails in the middle of a reply: the client still closes the session."""
    with contextlib.suppress(ZeroDivisionError):
        async with DuplexClient(url, model="voice") as client:
            await client.stream_pcm(recordings[0], realtime=False)
            await client.commit()
            await answered(client)
            raise ZeroDivisionError
    return {"session": client.session_id}


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (turns, hands_free, barge_in, cancel, dropped, undisturbed, presets, errors, breaks)
}

if __name__ == "__main__":
    name, address, *paths = sys.argv[1:]
    print(json.dumps(asyncio.run(SCENES[name](address, [read_pcm16_wav(Path(path)) for path in paths]))))
