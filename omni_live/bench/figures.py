"""The figures of `bench voice`: their names, and how each is made of what happened."""

from collections.abc import Sequence
from typing import Final

from omni_live.bench.report import Row, Value
from omni_live.bench.timeline import PausedTurn, Silencing, largest, median, quantile
from omni_live.bench.words import word_error_rate
from omni_live.clients.clock import MS
from omni_live.clients.turns import TurnReport

ROWS: Final = (
    Row("v2v_ms_p50", "voice to voice, median", "ms"),
    Row("v2v_ms_max", "voice to voice, longest", "ms"),
    Row("v2v_after_endpoint_ms_p50", "end of turn to first sound, median", "ms", 1),
    Row("underruns", "gaps in playback"),
    Row("wer", "word error rate", "", 4),
    Row("turns", "turns"),
    Row("v2v_ms_p50_4", "voice to voice with 4 users, median", "ms"),
    Row("v2v_ms_max_4", "voice to voice with 4 users, longest", "ms"),
    Row("v2v_ms_p50_8", "voice to voice with 8 users, median", "ms"),
    Row("cutoffs", "turns taken inside a pause, share", "", 3),
    Row("cutoff_pauses", "pauses of 400 to 700 ms between words"),
    Row("cutoff_v2v_ms_p50", "voice to voice in the same turns, median", "ms"),
    Row("false_interrupts", "replies that a mm-hm, noise or echo ended"),
    Row("false_interrupt_trials", "replies with a mm-hm, noise or echo"),
    Row("cancel_to_silence_ms_p99", "cancel to silence, 99 of 100", "ms", 1),
    Row("speech_to_silence_ms_p95", "speech to silence, 95 of 100", "ms"),
    Row("stale_chunks", "content behind the end of its reply"),
    Row("ttft_growth", "time to first token, turn 12 over turn 2", "", 2),
    Row("idle_cpu_fraction", "processor when idle, share of a core", "", 5),
    Row("rss_mb", "memory of all processes (PSS)", "MiB"),
    Row("rss_sum_mb", "memory of all processes (sum of RSS)", "MiB"),
    Row("ready_s", "start until ready", "s", 2),
    Row("runs", "runs"),
    Row("load1_before", "load of the machine before", "", 2),
    Row("load1_after", "load of the machine after", "", 2),
    Row("cpus", "processors"),
    Row("model", "pipeline"),
    Row("settings", "settings"),
)


def alone(reports: Sequence[TurnReport]) -> dict[str, Value]:
    """One user at a time."""
    after_ms = [
        (report.first_audio_ns - report.committed_ns) / MS
        for report in reports
        if report.first_audio_ns is not None and report.committed_ns is not None
    ]
    return {
        "v2v_ms_p50": median(latencies(reports)),
        "v2v_ms_max": largest(latencies(reports)),
        "v2v_after_endpoint_ms_p50": median(after_ms),
        "underruns": sum(report.underruns for report in reports),
        "wer": word_error_rate([(report.said, report.heard) for report in reports if report.said]),
        "turns": len(latencies(reports)),
    }


def latencies(reports: Sequence[TurnReport]) -> list[float]:
    """Voice to voice, of the turns that were answered."""
    return [report.v2v_ms for report in reports if report.v2v_ms is not None]


def cutoffs(turns: Sequence[PausedTurn]) -> dict[str, Value]:
    """Turns with a pause in them."""
    intact = [turn.v2v_ms for turn in turns if turn.v2v_ms is not None]
    cut = sum(turn.cut_off for turn in turns)
    return {
        "cutoffs": cut / len(turns) if turns else None,
        "cutoff_pauses": len(turns),
        "cutoff_v2v_ms_p50": median(intact),
    }


def sweep_line(min_silence_ms: int, turns: Sequence[PausedTurn]) -> str:
    """One line of the sweep."""
    values = cutoffs(turns)
    share, v2v_ms = values["cutoffs"], values["cutoff_v2v_ms_p50"]
    cut = f"{share:.3f}" if isinstance(share, float) else "-"
    latency = f"{v2v_ms:.0f} ms" if isinstance(v2v_ms, float) else "-"
    return f"min_silence_ms={min_silence_ms}: cut off {cut} of {len(turns)}, voice to voice {latency}"


def silence(cancels: Sequence[Silencing], speech: Sequence[Silencing]) -> dict[str, Value]:
    """Replies that were stopped."""
    return {
        "cancel_to_silence_ms_p99": quantile((one.ms for one in cancels), 0.99),
        "speech_to_silence_ms_p95": quantile((one.ms for one in speech), 0.95),
    }
