"""A conversation: the session of people who talk, in sound or in text.

It keeps the items, decides with the `Floor` whose turn it is, starts turns (tentatively first, where it may), paces
the reply, and after an interruption holds what was heard, no more and no less. The order of its events is that of
OpenAI's Realtime API: whatever was opened is also closed, and a response's `ResponseDone` is the last of it.
"""

from collections.abc import Mapping
from dataclasses import replace

from omni_live.sessions.continuity import Continuity, Message
from omni_live.sessions.effects import Count, Credit, Feed, Hold, Restore, SnapshotReady, Submit, TakeSnapshot, Unhold
from omni_live.sessions.events import (
    AudioDelta,
    AudioDone,
    AudioTranscriptDelta,
    AudioTranscriptDone,
    BufferCleared,
    BufferCommitted,
    ContextDropped,
    ErrorTold,
    Event,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    OverlapDecided,
    PartAdded,
    PartDone,
    PlaybackAcknowledged,
    ResponseCreated,
    ResponseDone,
    ResyncRequired,
    SessionCreated,
    SessionResumed,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TextDone,
    TranscriptionDone,
    TranscriptionFailed,
)
from omni_live.sessions.exchange import (
    CONVERSATION_LANE,
    SIDE_LANE,
    TENTATIVE_LANES,
    Awaited,
    Exchange,
    Shape,
    concluded,
    names,
    read_chunk,
)
from omni_live.sessions.findings import read_finding
from omni_live.sessions.floor import (
    Announce,
    Commit,
    Decision,
    Floor,
    Forget,
    GiveUpTry,
    GoOnReply,
    HoldReply,
    Interrupt,
    Transcribed,
    Try,
)
from omni_live.sessions.history import History
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import (
    AudioAppended,
    AudioCleared,
    AudioCommitted,
    BargeInAsked,
    CancelAsked,
    ItemCreateAsked,
    ItemDeleteAsked,
    ItemRetrieveAsked,
    ItemTruncateAsked,
    Outcome,
    PlaybackAcked,
    RespondAsked,
    RestoreAsked,
    SettingsAsked,
    SnapshotAsked,
    StageEnded,
    StageFound,
    StageLost,
    StageSnapshotted,
    StageSpoke,
    TextAppended,
)
from omni_live.sessions.items import Item, ItemStatus, Response, ResponseStatus, Role
from omni_live.sessions.journal import Replay
from omni_live.sessions.lease import SECOND
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.reply import Reply
from omni_live.sessions.session import Session
from omni_live.sessions.settings import Settings, TurnDetection
from omni_live.sessions.stamp import LANES, Stamp
from omni_live.sessions.turn import Cue, SessionState, TurnState, follow

LEAST_COMMIT_MS = 100
"""A manual commit of less audio is refused, as OpenAI's server does."""

TRUNCATE_LENIENCY_MS = 260
"""A truncate past the end by no more than a chunk is taken as the end: clients race by a few milliseconds."""

MS = SECOND // 1000


class Conversation(Session):
    """See the module. `shape` names the pipeline's stages."""

    def __init__(
        self,
        session_id: str,
        slot: int,
        generation: int,
        limits: Limits,
        ids: Ids,
        now: int,
        settings: Settings | None = None,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(session_id, slot, generation, limits, ids, now)
        self.settings = settings or Settings()
        self.shape = shape or Shape()
        self.items: list[Item] = []
        self._floor = Floor(self.shape.input_rate_hz, self.settings.turn_detection, self.settings.overlap)
        self._continuity = Continuity()
        self._exchange: Exchange | None = None
        self._tried: Exchange | None = None
        self._side: Exchange | None = None
        self._last: Exchange | None = None
        """The latest exchange that is over: its audio may still be playing."""
        self._turns = 0
        self._held = False
        self._held_ns = 0
        self._owed = False
        """A committed user turn waits for the running response to end."""
        self._spoke_audio = False
        self._announced: dict[int, str] = {}
        """Item ids of announced utterances that are not committed."""
        self._awaited: list[Awaited] = []
        self._snapshot: tuple[int, History] | None = None
        """The one being taken: its ticket, and the history at the moment it was asked for."""
        self._fed = 0
        self._fed_at_commit = 0
        self._utterances = 0
        self._rules |= {
            StageSpoke: self._stage_spoke,
            StageEnded: self._stage_ended,
            StageFound: self._stage_found,
            StageLost: self._stage_lost,
            StageSnapshotted: self._stage_snapshotted,
            SnapshotAsked: self._snapshot_asked,
            RestoreAsked: self._restore_asked,
            AudioAppended: self._audio_appended,
            AudioCommitted: self._audio_committed,
            AudioCleared: self._audio_cleared,
            SettingsAsked: self._settings_asked,
            ItemCreateAsked: self._item_create_asked,
            ItemDeleteAsked: self._item_delete_asked,
            ItemRetrieveAsked: self._item_retrieve_asked,
            ItemTruncateAsked: self._item_truncate_asked,
            RespondAsked: self._respond_asked,
            TextAppended: self._text_appended,
            CancelAsked: self._cancel_asked,
            BargeInAsked: self._barge_in_asked,
            PlaybackAcked: self._playback_acked,
        }

    # -- the session ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return self._exchange is not None or self._side is not None

    def _greet(self) -> Event:
        self._hold_anew()
        if self.shape.ears:
            self._configure_ears()
        left = (self._lease.expires_ns - self._now) / SECOND
        return SessionCreated(self.session_id, self.settings, self.attachment, self.token, left)

    def _welcome_back(self, replay: Replay) -> list[Event]:
        self._hold_anew()
        resumed = SessionResumed(
            self.session_id, self.settings, self.attachment, self.token, replay.voids, self._inputs.taken
        )
        if replay.gap is None:
            return [resumed]
        reason = "journal_overflow" if replay.overflowed else "journal_gap"
        return [resumed, ResyncRequired(*replay.gap, reason, tuple(self.items))]

    def _hold_anew(self) -> None:
        """A new transport knows of no hold."""
        if self._held:
            self._effects.append(Hold())

    def _settle(self) -> None:
        if self._held and self._now >= self._held_ns + self.limits.hold_patience_ms * MS:
            self._go_on("silence")
        while self._awaited and self._now >= self._awaited[0].until_ns:
            self._no_transcript(self._awaited.pop(0).item_id, "timeout")
        self._think()
        self._release()
        self._time_out()
        waits = self._exchange is not None or self._floor.speaking or self.state is SessionState.DRAINING
        if self._owed and not waits:
            self._respond(RespondAsked())
        if self.state is SessionState.DRAINING and not self.busy:
            self._close("drained")

    def _next_ns(self) -> int | None:
        times = [awaited.until_ns for awaited in self._awaited[:1]]
        if self._held:
            times.append(self._held_ns + self.limits.hold_patience_ms * MS)
        for exchange in (self._exchange, self._side):
            if exchange is not None and exchange.state is not TurnState.LISTENING:
                release_ns = self._release_ns(exchange)
                times += [self._deadline_ns(exchange)] if release_ns is None else [release_ns]
        return min(times, default=None)

    def _deadline_ns(self, exchange: Exchange) -> int:
        return exchange.since_ns + round(self.limits.turn_deadline_s * SECOND)

    def _time_out(self) -> None:
        """A turn of which nothing has come or gone out for too long fails."""
        for exchange in (self._exchange, self._side):
            if exchange is None or exchange.state is TurnState.LISTENING:
                continue
            if self._now >= self._deadline_ns(exchange):
                exchange.reason = "timeout"
                self._failed(exchange)

    def _end_turns(self, reason: str) -> None:
        if self._tried is not None:
            self._abort(self._tried.stamp)
            self._tried = None
        for exchange in (self._exchange, self._side):
            if exchange is not None:
                self._abort(exchange.stamp)
                self._finish(exchange, Cue.CUT, reason)

    def _settings_asked(self, input: SettingsAsked) -> None:
        self._lease.touch(self._now)
        old, new = self.settings, input.settings
        if new.model != old.model:
            self._refuse("model_immutable", "The model of a session cannot be changed.", input.event_id, "model")
        elif new.voice != old.voice and self._spoke_audio:
            message = "The voice cannot be changed once the session has spoken."
            self._refuse("cannot_update_voice", message, input.event_id, "session.audio.output.voice")
        else:
            self.settings = new
            self._floor.detection, self._floor.overlap = new.turn_detection, new.overlap
            if new != old:
                self._drop_try()  # it was begun under the old ones
            if new.turn_detection != old.turn_detection and self.shape.ears:
                self._configure_ears()
            self._emit(SessionUpdated(new, input.event_id))

    def _refuse(self, code: str, message: str, event_id: str | None, param: str | None = None) -> None:
        self._effects.append(Count(f"refused_{code}"))
        self._emit(ErrorTold(code, message, event_id, param))

    # -- forks and snapshots -------------------------------------------------------------------------------------

    def history(self) -> History:
        """The conversation so far, without the turn that runs."""
        items = tuple(item for item in self.items if item.status is not ItemStatus.IN_PROGRESS)
        return History(self.settings, items, self._turns, self._continuity.known)

    def forked(self, session_id: str, slot: int, generation: int, ids: Ids, now: int) -> "Conversation":
        """A second session that goes on from here; whoever opens it copies the stages' state along."""
        twin = Conversation(session_id, slot, generation, self.limits, ids, now, self.settings, self.shape)
        twin._take_on(self.history())
        return twin

    def _take_on(self, history: History) -> None:
        self.settings = history.settings
        self.items = list(history.items)
        self._turns = history.turns
        self._continuity.known = history.known

    def _snapshot_asked(self, input: SnapshotAsked) -> None:
        if self._snapshot is not None:
            self._refuse("snapshot_in_progress", "A snapshot is being taken already.", None)
            return
        self._drop_try()
        self._snapshot = (input.ticket, self.history())
        self._effects.append(TakeSnapshot(self.shape.thinker, input.ticket))

    def _stage_snapshotted(self, input: StageSnapshotted) -> None:
        if self._snapshot is None or self._snapshot[0] != input.ticket:
            self._effects.append(Count("stale_snapshot"))
            return
        ticket, history = self._snapshot
        self._snapshot = None
        self._effects.append(SnapshotReady(ticket, history, input.payload))

    def _restore_asked(self, input: RestoreAsked) -> None:
        self._drop_try()
        for exchange in (self._exchange, self._side):
            if exchange is not None:
                self._cut(exchange, "client_cancelled")
        for lane in range(LANES):
            self._raise_fence(lane)  # the numbers of turns are given out once more
        self._last = None
        self._owed = False
        self._awaited.clear()
        self._take_on(input.history)
        self._continuity.lost()  # what a stage restores is worth its time, but the messages are told again
        if input.state is not None:
            self._effects.append(Restore(self.shape.thinker, input.state))
        self._floor.detection, self._floor.overlap = self.settings.turn_detection, self.settings.overlap
        self._audio_cleared(AudioCleared())
        if self.shape.ears:
            self._configure_ears()
        self._emit(SessionUpdated(self.settings))

    # -- the user's side -----------------------------------------------------------------------------------------

    def _audio_appended(self, input: AudioAppended) -> None:
        self._lease.touch(self._now)
        if not self.shape.ears:
            self._refuse("unsupported_input", "This model does not take audio.", None)
            return
        self._fed += len(input.pcm) // 2
        self._feed_ears(Payload("pcm", body=input.pcm))

    def _audio_committed(self, input: AudioCommitted) -> None:
        self._lease.touch(self._now)
        if self._fed - self._fed_at_commit < LEAST_COMMIT_MS * self.shape.input_rate_hz // 1000:
            message = f"Error committing input audio buffer: the buffer has less than {LEAST_COMMIT_MS} ms of audio."
            self._refuse("input_audio_buffer_commit_empty", message, input.event_id)
            return
        self._drop_try()
        self._floor.reset()
        self._go_on("committed")
        announced = self._announced.pop(self._utterances, None)
        item_id = announced or self._ids("item")
        if announced is not None:
            self._emit(SpeechStopped(item_id, self._ms(self._fed)))
        self._await_transcript(item_id, 0, input.respond)
        self._feed_ears(Payload("commit", {"utterance": 0}))
        self._add_user_item(item_id, "", self._ms(self._fed - self._fed_at_commit))
        self._fed_at_commit = self._fed

    def _audio_cleared(self, _: AudioCleared) -> None:
        self._lease.touch(self._now)
        self._drop_try()
        self._floor.reset()
        self._announced.clear()
        self._fed_at_commit = self._fed
        self._go_on("cleared")
        if self.shape.ears:
            self._feed_ears(Payload("clear"))
        self._emit(BufferCleared())

    def _feed_ears(self, payload: Payload) -> None:
        self._effects.append(Feed(self.shape.ears, payload))

    def _configure_ears(self) -> None:
        detection = self.settings.turn_detection or TurnDetection()
        self._feed_ears(
            Payload(
                "configure",
                {
                    "detect": self.settings.turn_detection is not None,
                    "threshold": detection.threshold,
                    "prefix_padding_ms": detection.prefix_padding_ms,
                    "speculative_ms": detection.speculative_ms,
                    "silence_duration_ms": detection.silence_duration_ms,
                    "min_speech_ms": detection.min_speech_ms,
                    "position": self._fed,
                    "utterance": self._utterances,
                },
            )
        )

    def _stage_found(self, input: StageFound) -> None:
        if input.payload.kind == "dropped":
            self._context_dropped(input.payload)
            return
        finding = read_finding(input.payload)
        if finding is None:
            self._effects.append(Count("unknown_finding"))
            return
        self._utterances = max(self._utterances, finding.utterance)
        self._held_ns = self._now
        for decision in self._floor.take(finding, self._audible()):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Announce(utterance, start):
                self._announce(utterance, start)
            case HoldReply():
                self._hold()
            case GoOnReply(reason):
                self._go_on(reason)
            case Interrupt(utterance, start):
                self._interrupted_by(utterance, start)
            case Try(utterance, text):
                self._try(utterance, text)
            case GiveUpTry():
                self._drop_try()
            case Commit():
                self._commit(decision)
            case Forget():
                self._forget(decision)
            case Transcribed(heard):
                self._transcribed(heard.utterance, heard.text, heard.end - heard.start)

    def _announce(self, utterance: int, start: int) -> None:
        item_id = self._ids("item")
        self._announced[utterance] = item_id
        self._emit(SpeechStarted(item_id, self._ms(start)))

    def _commit(self, commit: Commit) -> None:
        item_id = self._announced.pop(commit.utterance, None) or self._ids("item")
        self._feed_ears(Payload("commit", {"utterance": commit.utterance}))
        self._emit(SpeechStopped(item_id, self._ms(commit.end)))
        self._fed_at_commit = self._fed
        heard = commit.heard
        if heard is None:
            self._await_transcript(item_id, commit.utterance, None)
            self._add_user_item(item_id, "", 0)
            return
        self._add_user_item(item_id, heard.text, self._ms(heard.end - heard.start))
        self._respond_to(item_id, heard.text, heard.end - heard.start)

    def _await_transcript(self, item_id: str, utterance: int, respond: bool | None) -> None:
        self._awaited.append(
            Awaited(item_id, utterance, respond, self._now + round(self.limits.transcript_patience_s * SECOND))
        )

    def _transcribed(self, utterance: int, text: str, samples: int) -> None:
        """The transcript of an utterance that was committed without one."""
        mine = [awaited for awaited in self._awaited if awaited.utterance == utterance]
        awaited = next(iter(mine or [awaited for awaited in self._awaited if not awaited.utterance]), None)
        if awaited is None:
            self._effects.append(Count("transcript_of_nothing"))
            return
        self._awaited.remove(awaited)
        self._change_item(awaited.item_id, text=text, audio_ms=self._ms(samples))
        self._respond_to(awaited.item_id, text, samples, awaited.respond)

    def _no_transcript(self, item_id: str, code: str) -> None:
        self._effects.append(Count("transcripts_failed"))
        if self.settings.transcription:
            self._emit(TranscriptionFailed(item_id, code, "The audio could not be transcribed."))

    def _answers(self) -> bool:
        detection = self.settings.turn_detection
        return self.settings.answers_commits if detection is None else detection.create_response

    def _respond_to(self, item_id: str, text: str, samples: int, respond: bool | None = None) -> None:
        if self.settings.transcription:
            self._emit(TranscriptionDone(item_id, text, samples / self.shape.input_rate_hz))
        answers = self._answers() if respond is None else respond
        if not text or not answers or self._find(item_id) is None:
            self._drop_try()
        elif self.state is SessionState.DRAINING:
            self._drop_try()
            self._effects.append(Count("unanswered_draining"))
        elif self._exchange is not None:
            # one that waits for transcripts will have seen this one
            self._owed = self._owed or self._exchange.state is not TurnState.LISTENING
        elif self._tried is not None and self._fits(self._tried):
            self._adopt(self._tried)
        else:
            self._drop_try()
            self._respond(RespondAsked())

    def _forget(self, forget: Forget) -> None:
        self._drop_try()
        self._feed_ears(Payload("discard", {"utterance": forget.utterance}))
        self._effects.append(Count("speech_forgotten"))
        item_id = self._announced.pop(forget.utterance, None)
        if forget.announced and item_id is not None:
            self._emit(SpeechStopped(item_id, self._ms(forget.end)))
            self._emit(BufferCleared())

    def _ms(self, samples: int) -> int:
        return samples * 1000 // self.shape.input_rate_hz

    # -- overlap -------------------------------------------------------------------------------------------------

    def _audible(self) -> bool:
        """Whether speech now would be speech during a reply."""
        if self._exchange is not None:
            return True
        return self._last is not None and not self._last.cut and self._last.reply.audible(self._now)

    def _hold(self) -> None:
        if not self._held:
            self._held = True
            self._effects.append(Hold())
            self._emit(OverlapDecided("hold", "speech", self._overlapped_id()))

    def _go_on(self, reason: str) -> None:
        if self._held:
            self._let_go()
            self._emit(OverlapDecided("drop", reason, self._overlapped_id()))

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._effects.append(Unhold())

    def _overlapped_id(self) -> str:
        exchange = self._exchange or self._last
        return "" if exchange is None else exchange.response.id

    def _interrupted_by(self, utterance: int, start: int) -> None:
        response_id = self._overlapped_id()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._fence(exchange)
        self._cut_last()
        self._announce(utterance, start)
        self._emit(OverlapDecided("barge_in", "speech", response_id))
        if exchange is not None:
            self._finish(exchange, Cue.CUT, "turn_detected")
        self._let_go()

    def _cancel_asked(self, input: CancelAsked) -> None:
        self._lease.touch(self._now)
        for exchange in (self._exchange, self._side):
            if exchange is not None and input.response_id in (None, exchange.response.id):
                self._cut(exchange, "client_cancelled")
                return
        message = "Cancellation failed: no active response found."
        self._refuse("response_cancel_not_active", message, input.event_id)

    def _barge_in_asked(self, _: BargeInAsked) -> None:
        self._lease.touch(self._now)
        self._drop_try()
        exchange, self._exchange = self._exchange, None
        self._cut_last()
        if exchange is not None:
            self._cut(exchange, "turn_detected")
        self._let_go()

    def _cut(self, exchange: Exchange, reason: str) -> None:
        """Fence, then start the abort, then the terminals."""
        self._fence(exchange)
        self._finish(exchange, Cue.CUT, reason)
        self._let_go()

    def _fence(self, exchange: Exchange) -> None:
        if exchange.lane != SIDE_LANE:
            self._raise_fence(CONVERSATION_LANE)
        if exchange.lane != CONVERSATION_LANE:
            self._raise_fence(exchange.lane)
        self._abort(exchange.stamp)

    # -- starting turns ------------------------------------------------------------------------------------------

    def _respond_asked(self, input: RespondAsked) -> None:
        self._lease.touch(self._now)
        if self.state is SessionState.DRAINING:
            self._refuse("draining", "The server is going away.", input.event_id)
        elif input.out_of_band:
            self._respond_beside(input)
        elif self._exchange is not None:
            message = f"Conversation already has an active response in progress: {self._exchange.response.id}."
            self._refuse("conversation_already_has_active_response", message, input.event_id)
        else:
            self._drop_try()
            self._respond(input)

    def _respond_beside(self, input: RespondAsked) -> None:
        if self._side is not None:
            self._refuse("too_many_responses", "One out-of-band response runs already.", input.event_id)
            return
        self._turns += 1
        self._side = self._begin(SIDE_LANE, self._turns, input)
        self._emit(ResponseCreated(self._side.response))
        self._submit(self._side, self._messages(input.instructions))

    def _respond(self, options: RespondAsked) -> None:
        self._owed = False
        self._turns += 1
        self._exchange = self._begin(CONVERSATION_LANE, self._turns, options)
        self._emit(ResponseCreated(self._exchange.response))
        self._think()

    def _think(self) -> None:
        """Start the turn that waited for the transcripts of what it shall answer."""
        exchange = self._exchange
        if exchange is not None and exchange.state is TurnState.LISTENING and not self._awaited:
            self._submit(exchange, self._messages(exchange.options.instructions))

    def _try(self, utterance: int, text: str) -> None:
        """Start the turn tentatively: nothing is emitted, and nothing remains of it where the user goes on."""
        if self._exchange is not None or self.state is SessionState.DRAINING or not self._answers():
            return
        self._drop_try()
        user = Message(self._announced.get(utterance, ""), Role.USER, text)
        lane = TENTATIVE_LANES[self._turns % len(TENTATIVE_LANES)]
        self._tried = self._begin(lane, self._turns + 1, RespondAsked())
        self._tried.tentative = True
        self._submit(self._tried, [*self._messages(), user])

    def _fits(self, tried: Exchange) -> bool:
        """Whether the turn, begun now, would be the one that was tried."""
        return tried.stamp.turn == self._turns + 1 and tried.messages == tuple(self._messages())

    def _adopt(self, exchange: Exchange) -> None:
        """The pause held: what was tried is the turn, and what is ready goes out."""
        self._tried = None
        self._owed = False
        self._turns += 1
        exchange.tentative = False
        exchange.since_ns = self._now
        self._exchange = exchange
        self._effects.append(Count("tentative_adopted"))
        self._emit(ResponseCreated(exchange.response))
        for delta in exchange.pending:
            self._say(exchange, delta)
        exchange.pending.clear()

    def _drop_try(self) -> None:
        if self._tried is not None:
            exchange, self._tried = self._tried, None
            self._raise_fence(exchange.lane)
            self._abort(exchange.stamp)
            self._effects.append(Count("tentative_discarded"))

    def _begin(self, lane: int, turn: int, options: RespondAsked) -> Exchange:
        settings = self.settings
        response = Response(
            self._ids("resp"),
            turn,
            ResponseStatus.IN_PROGRESS,
            options.modality or settings.modality,
            metadata=options.metadata or {},
            in_conversation=lane != SIDE_LANE,
            voice=settings.voice,
        )
        reply = Reply(self.shape.output_rate_hz, settings.lead_ms)
        stamp = self.fences[lane].stamp(turn, self._now)
        return Exchange(lane, stamp, response, reply, options, since_ns=self._now)

    def _submit(self, exchange: Exchange, messages: list[Message]) -> None:
        exchange.state = follow(TurnState.LISTENING, Cue.COMMITTED)
        exchange.messages = tuple(messages)
        exchange.spoken = 0
        exchange.since_ns = self._now
        stage = self.shape.voice if exchange.audio else self.shape.thinker
        context = self._continuity.context(messages, remember=exchange.lane != SIDE_LANE)
        params = self._params(exchange)
        self._effects.append(Submit(exchange.stamp, self.shape.thinker, frozenset((stage,)), context, params))

    def _params(self, exchange: Exchange) -> Mapping[str, Scalar]:
        settings, options = self.settings, exchange.options
        seed = settings.seed if options.seed is None else options.seed
        return {
            # depends on the turn's number alone, so that a replay gives the same sound
            "seed": (seed * 1_000_003 + exchange.stamp.turn) & 0x7FFFFFFF,
            "voice": settings.voice,
            "speed": settings.speed,
            "temperature": settings.temperature,
            "max_tokens": options.max_output_tokens or settings.max_output_tokens or 0,
            "side": exchange.lane == SIDE_LANE,
        }

    def _messages(self, instructions: str | None = None) -> list[Message]:
        """What the model shall see: the instructions, then every item with something in it."""
        system = self.settings.instructions if instructions is None else instructions
        first = [Message("", Role.SYSTEM, system)] if system else []
        return first + [Message(item.id, item.role, item.text) for item in self.items if item.text]

    # -- what stages say -----------------------------------------------------------------------------------------

    def _of(self, stamp: Stamp) -> Exchange | None:
        """The live exchange the stamp belongs to; stale output is counted and dropped (G1, G5)."""
        if self._admits(stamp):
            for exchange in (self._exchange, self._tried, self._side):
                if exchange is not None and (exchange.stamp.slot, exchange.stamp.turn) == (stamp.slot, stamp.turn):
                    return exchange
        self._effects.append(Count("stale_output"))
        return None

    def _stage_spoke(self, input: StageSpoke) -> None:
        exchange = self._of(input.stamp)
        if exchange is None:
            return
        payload = input.payload
        if exchange.complete:
            self._effects.append(Count("output_after_end"))
            return
        if input.stamp.seq < exchange.spoken:
            self._effects.append(Count("repeated_output"))
            return
        if input.stamp.seq > exchange.spoken:
            exchange.reason = "output_lost"  # nobody may hear a reply with a hole in it (G7)
            self._failed(exchange)
            return
        exchange.spoken += 1
        exchange.since_ns = self._now
        if payload.kind == "text":
            self._effects.append(Credit(exchange.stamp, input.stage, 1))
            text = str(payload.meta.get("text", ""))
            if exchange.tentative:
                exchange.pending.append(text)
            else:
                self._say(exchange, text)
        else:
            exchange.reply.receive(read_chunk(payload))
            if exchange.reply.received > self.limits.max_reply_s * self.shape.output_rate_hz:
                self._cap(exchange)

    def _cap(self, exchange: Exchange) -> None:
        """The reply is as long as a reply may be: what is there is played, nothing more is made."""
        exchange.complete = True
        exchange.outcome, exchange.reason = Outcome.INCOMPLETE, "max_output_tokens"
        self._effects.append(Count("reply_too_long"))
        self._abort(exchange.stamp)

    def _stage_ended(self, input: StageEnded) -> None:
        exchange = self._of(input.stamp)
        if exchange is None or exchange.complete:
            return
        exchange.complete = True
        exchange.since_ns = self._now
        exchange.outcome, exchange.reason = input.outcome, input.reason
        if input.outcome is Outcome.FAILED:
            self._failed(exchange)

    def _failed(self, exchange: Exchange) -> None:
        if exchange.lane != SIDE_LANE:
            self._continuity.lost()  # what the stage's state stands for now is not known
        if exchange.tentative:
            self._drop_try()
            return
        self._fence(exchange)
        self._finish(exchange, Cue.BROKE, exchange.reason or "stage_error")
        self._let_go()

    def _stage_lost(self, input: StageLost) -> None:
        if input.stage == self.shape.thinker:
            self._continuity.lost()
            self._drop_try()
        elif input.stage == self.shape.ears:
            self._deafened()

    def _deafened(self) -> None:
        """The ears are gone with all the audio that was not transcribed yet."""
        self._drop_try()
        self._floor.lost()
        self._go_on("stage_lost")
        self._fed_at_commit = self._fed
        self._configure_ears()
        announced, self._announced = self._announced, {}
        awaited, self._awaited = self._awaited, []
        for item_id in announced.values():
            self._emit(SpeechStopped(item_id, self._ms(self._fed)))
            self._emit(BufferCleared())
        for one in awaited:
            self._no_transcript(one.item_id, "stage_lost")

    def _context_dropped(self, payload: Payload) -> None:
        count = payload.meta.get("items", 0)
        self._drop_items(self._continuity.oldest(count if isinstance(count, int) else 0))

    def _drop_items(self, gone: frozenset[str]) -> None:
        """These are no longer a part of the conversation; the thinker forgets them, too."""
        # in order with the contexts that follow, so that both ends always count the same messages
        forgotten = self._continuity.dropped(gone)
        self._effects.append(Feed(self.shape.thinker, Payload("forget", {"items": forgotten})))
        left = tuple(item.id for item in self.items if item.id in gone)
        if left:
            self.items = [item for item in self.items if item.id not in gone]
            self._effects.append(Count("context_dropped", len(left)))
            self._emit(ContextDropped(left))

    # -- the reply on its way out --------------------------------------------------------------------------------

    def _release_ns(self, exchange: Exchange) -> int | None:
        if self._held and exchange.lane != SIDE_LANE:
            return None
        return exchange.reply.release_ns(self._now)

    def _release(self) -> None:
        """Send what may go out by now, and finish what is complete."""
        for exchange in (self._exchange, self._side):
            if exchange is None:
                continue
            while (at := self._release_ns(exchange)) is not None and at <= self._now:
                self._speak(exchange)
            if exchange.complete and not exchange.reply.waiting and not exchange.state.over:
                cue = Cue.FINISHED if exchange.outcome is Outcome.DONE else Cue.CUT_SHORT
                self._finish(exchange, cue, exchange.reason)

    def _content(self, exchange: Exchange) -> Stamp:
        """What its content is stamped with: a cut voids it, but no discarded turn on the lane it was tried on does."""
        lane = SIDE_LANE if exchange.lane == SIDE_LANE else CONVERSATION_LANE
        return self.fences[lane].stamp(exchange.stamp.turn)

    def _speak(self, exchange: Exchange) -> None:
        reply = exchange.reply
        start = reply.released
        chunk = reply.release(self._now)
        exchange.since_ns = self._now
        item = self._open_item(exchange)
        content = self._content(exchange)
        self._spoke_audio = True
        response_id = exchange.response.id
        if chunk.text:
            self._emit(AudioTranscriptDelta(response_id, item.id, chunk.text), content, len(chunk.text))
        marks = tuple((mark.sample, mark.char) for mark in chunk.marks)
        if chunk.pcm:
            delta = AudioDelta(response_id, item.id, chunk.pcm, start, self.epoch, marks)
            self._emit(delta, content, len(chunk.pcm))
        self._effects.append(Credit(exchange.stamp, self.shape.voice, 1))

    def _say(self, exchange: Exchange, delta: str) -> None:
        item = self._open_item(exchange)
        exchange.text += delta
        self._emit(TextDelta(exchange.response.id, item.id, delta), self._content(exchange), len(delta))

    def _open_item(self, exchange: Exchange) -> Item:
        """The output item, announced before its first delta."""
        if exchange.item is not None:
            return exchange.item
        item = Item(self._ids("item"), Role.ASSISTANT, "", exchange.audio, ItemStatus.IN_PROGRESS)
        exchange.item = item
        exchange.state = follow(exchange.state, Cue.FIRST_OUTPUT)
        self._emit(OutputItemAdded(exchange.response.id, item))
        if exchange.response.in_conversation:
            self._emit(ItemAdded(item, self._last_item_id()))
            self._keep_item(item)
        self._emit(PartAdded(exchange.response.id, item))
        return item

    def _finish(self, exchange: Exchange, cue: Cue, reason: str) -> None:
        """The turn's one end: close what was opened, then the terminal."""
        exchange.state = follow(exchange.state, cue)
        if exchange is self._side:
            self._side = None
        else:
            self._exchange = None
            if exchange.audio and exchange.item is not None:
                self._last = exchange
        item = self._close_item(exchange, whole=cue is Cue.FINISHED)
        self._emit(ResponseDone(concluded(exchange.response, cue, reason, item)))
        self._effects.append(Count(f"turn_{exchange.state.value}"))
        if item is None or not exchange.response.in_conversation:
            return
        if cue is Cue.FINISHED:
            self._continuity.said(Message(item.id, Role.ASSISTANT, item.text))
        elif cue is Cue.CUT and exchange.audio:
            self._hold_to_heard(exchange)

    def _close_item(self, exchange: Exchange, whole: bool) -> Item | None:
        if exchange.item is None:
            return None
        response_id, item_id = exchange.response.id, exchange.item.id
        text = exchange.reply.text if exchange.audio else exchange.text
        status = ItemStatus.COMPLETED if whole else ItemStatus.INCOMPLETE
        audio_ms = exchange.reply.released * 1000 // self.shape.output_rate_hz
        item = replace(exchange.item, text=text, status=status, audio_ms=audio_ms)
        exchange.item = item
        if exchange.audio:
            self._emit(AudioDone(response_id, item_id))
            self._emit(AudioTranscriptDone(response_id, item_id, text), nbytes=len(text))
        else:
            self._emit(TextDone(response_id, item_id, text), nbytes=len(text))
        self._emit(PartDone(response_id, item), nbytes=len(text))
        self._emit(OutputItemDone(response_id, item), nbytes=len(text))
        if exchange.response.in_conversation:
            self._change_item(item_id, text=text, status=status, audio_ms=audio_ms)
            self._emit(ItemDone(item, self._item_before(item_id)), nbytes=len(text))
        return item

    # -- what was heard ------------------------------------------------------------------------------------------

    def _playback_acked(self, input: PlaybackAcked) -> None:
        self._lease.touch(self._now)
        for exchange in (self._exchange, self._last, self._side):
            if exchange is None or not names(input, exchange):
                continue
            reply = exchange.reply
            reply.ack(round(input.played_ms * self.shape.output_rate_hz / 1000), self._now)
            if exchange.cut:
                self._hold_to_heard(exchange)
            break
        self._tell(PlaybackAcknowledged(input.played_ms, input.response_id, input.event_id))

    def _cut_last(self) -> None:
        """Speech after a reply's end, while the client still plays it: the item is cut to what was heard.

        Nothing runs on the conversation's lane by now.
        """
        last = self._last
        if last is not None and not last.cut and last.reply.audible(self._now):
            self._raise_fence(CONVERSATION_LANE)  # what of it waits to be sent must not be heard any more (G1)
            self._hold_to_heard(last)

    def _hold_to_heard(self, exchange: Exchange) -> None:
        """Cut the item to what had been played by now (G8)."""
        exchange.cut = True
        reply = exchange.reply
        played = reply.acked if exchange.state.over and reply.acked is not None else reply.played(self._now)
        self._truncate(exchange, played)

    def _truncate(self, exchange: Exchange, samples: int) -> None:
        item = exchange.item
        if item is None or self._find(item.id) is None:
            return
        text = exchange.reply.heard(samples)
        audio_ms = samples * 1000 // self.shape.output_rate_hz
        changed = self._change_item(item.id, text=text, audio_ms=audio_ms)
        self._emit(ItemTruncated(item.id, 0, audio_ms, text), nbytes=len(text))
        if changed:
            self._think_again()

    def _think_again(self) -> None:
        """The context changed under a turn that has said nothing yet: start it anew on the right one."""
        self._drop_try()
        exchange = self._exchange
        if exchange is None or exchange.state is not TurnState.THINKING:
            return
        self._fence(exchange)
        exchange.lane = CONVERSATION_LANE
        exchange.stamp = self.fences[CONVERSATION_LANE].stamp(exchange.stamp.turn, self._now)
        exchange.reply = Reply(self.shape.output_rate_hz, self.settings.lead_ms)
        exchange.complete = False
        self._effects.append(Count("turn_restarted"))
        self._submit(exchange, self._messages(exchange.options.instructions))

    # -- items ---------------------------------------------------------------------------------------------------

    def _text_appended(self, input: TextAppended) -> None:
        self._lease.touch(self._now)
        if len(input.text) > self.limits.conversation_chars:
            self._refuse("invalid_value", "The text is too long.", input.event_id, "text")
            return
        if self._exchange is not None:
            self._cut(self._exchange, "client_cancelled")
        self._drop_try()
        item = Item(self._ids("item"), Role.USER, input.text, spoken=False)
        self._announce_item(item)
        if input.respond:
            self._respond_asked(RespondAsked(event_id=input.event_id))

    def _item_create_asked(self, input: ItemCreateAsked) -> None:
        self._lease.touch(self._now)
        item = input.item if input.item.id else replace(input.item, id=self._ids("item"))
        if self._find(item.id) is not None:
            message = f"Error adding item: an item with id '{item.id}' already exists."
            self._refuse("item_create_duplicate_item_id", message, input.event_id, "item.id")
            return
        if len(item.text) > self.limits.conversation_chars:
            self._refuse("invalid_value", "Error adding item: its text is too long.", input.event_id, "item.content")
            return
        at = len(self.items)
        if input.after == "root":
            at = 0
        elif input.after is not None:
            before = self._find(input.after)
            if before is None:
                message = "Error adding item: the previous item does not exist."
                self._refuse("item_create_invalid_previous_item_id", message, input.event_id, "previous_item_id")
                return
            at = before + 1
        self._announce_item(item, at)

    def _item_delete_asked(self, input: ItemDeleteAsked) -> None:
        self._lease.touch(self._now)
        at = self._find(input.item_id)
        if at is None:
            message = f"Error deleting item: no item with id '{input.item_id}' exists."
            self._refuse("item_delete_invalid_item_id", message, input.event_id, "item_id")
            return
        del self.items[at]
        self._emit(ItemDeleted(input.item_id))

    def _item_retrieve_asked(self, input: ItemRetrieveAsked) -> None:
        self._lease.touch(self._now)
        at = self._find(input.item_id)
        if at is None:
            message = f"Error retrieving item: no item with id '{input.item_id}' exists."
            self._refuse("item_retrieve_invalid_item_id", message, input.event_id, "item_id")
        else:
            self._emit(ItemRetrieved(self.items[at]))

    def _item_truncate_asked(self, input: ItemTruncateAsked) -> None:
        self._lease.touch(self._now)
        exchange = self._spoken(input.item_id)
        at = self._find(input.item_id)
        if at is None:
            message = f"Error truncating item: no item with id '{input.item_id}' exists."
            self._refuse("item_truncate_invalid_item_id", message, input.event_id, "item_id")
        elif exchange is None:
            message = "Error truncating item: it has no audio that could be truncated."
            self._refuse("unsupported_content_type", message, input.event_id, "item_id")
        elif not 0 <= input.audio_end_ms <= self._released_ms(exchange) + TRUNCATE_LENIENCY_MS:
            message = f"Error truncating item: audio_end_ms must lie in 0 to {self._released_ms(exchange)}."
            self._refuse("invalid_value", message, input.event_id, "audio_end_ms")
        else:
            exchange.reply.ack(input.audio_end_ms * self.shape.output_rate_hz // 1000, self._now)
            if exchange is self._exchange:
                self._cut(exchange, "client_cancelled")
            else:
                if self._exchange is None:
                    self._raise_fence(CONVERSATION_LANE)  # the client does not want what of it waits to be sent
                self._hold_to_heard(exchange)

    def _spoken(self, item_id: str) -> Exchange | None:
        for exchange in (self._exchange, self._last):
            if exchange is not None and exchange.audio and exchange.item is not None and exchange.item.id == item_id:
                return exchange
        return None

    def _released_ms(self, exchange: Exchange) -> int:
        return exchange.reply.released * 1000 // self.shape.output_rate_hz

    def _add_user_item(self, item_id: str, text: str, audio_ms: int) -> None:
        self._emit(BufferCommitted(item_id, self._last_item_id()))
        self._announce_item(Item(item_id, Role.USER, text, spoken=True, audio_ms=audio_ms))

    def _announce_item(self, item: Item, at: int | None = None) -> None:
        at = len(self.items) if at is None else at
        previous = self.items[at - 1].id if at else None
        self._emit(ItemAdded(item, previous), nbytes=len(item.text))
        self._keep_item(item, at)
        self._emit(ItemDone(item, previous), nbytes=len(item.text))

    def _keep_item(self, item: Item, at: int | None = None) -> None:
        self.items.insert(len(self.items) if at is None else at, item)
        count, size = len(self.items), sum(len(old.text) for old in self.items)
        gone = set()
        for old in self.items[:-1]:
            if count <= self.limits.conversation_items and size <= self.limits.conversation_chars:
                break
            gone.add(old.id)
            count, size = count - 1, size - len(old.text)
        if gone:
            self._drop_items(frozenset(gone))

    def _change_item(self, item_id: str, text: str, audio_ms: int, status: ItemStatus | None = None) -> bool:
        """Whether the model's view of the item changed."""
        at = self._find(item_id)
        if at is None:
            return False
        old = self.items[at]
        self.items[at] = replace(old, text=text, audio_ms=audio_ms, status=status or old.status)
        return old.text != text

    def _find(self, item_id: str) -> int | None:
        return next((at for at, item in enumerate(self.items) if item.id == item_id), None)

    def _last_item_id(self) -> str | None:
        return self.items[-1].id if self.items else None

    def _item_before(self, item_id: str) -> str | None:
        at = self._find(item_id)
        return self.items[at - 1].id if at else None
