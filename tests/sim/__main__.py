"""`python -m tests.sim --seed N` replays one schedule; `--seeds A-B` plays many and says which of them fail."""

import argparse
import hashlib
import json
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simscenes import draw, play  # beside this file, which need not be on the path

LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a seed."""

    digest: str
    counts: Counter[str]
    error: Exception | None


def played(seed: int, say: Callable[[str], None] | None = None) -> Played:
    try:
        world = play(seed, say)
    except Exception as error:  # noqa: BLE001 - whatever breaks a seed is what came of it
        return Played("", Counter(), error)
    return Played(world.digest(), world.counts, None)


def command(seed: int) -> str:
    return f"python -m tests.sim --seed {seed}"


def replay(seed: int, verbose: bool) -> int:
    """The scene, its schedule (the end of it, where it breaks), and whether every guarantee holds."""
    print(f"seed {seed}: {draw(seed)}")
    lines: deque[str] = deque(maxlen=LAST_LINES)
    result = played(seed, print if verbose else lines.append)
    if result.error is None:
        print(f"seed {seed} holds: {result.digest}")
        return 0
    print(*lines, sep="\n")
    sys.stdout.flush()
    traceback.print_exception(result.error)
    print(f"seed {seed} fails: {result.error}")
    if not verbose:
        print(f"the whole schedule: {command(seed)} --verbose")
    return 1


def play_all(seeds: range, first_only: bool) -> int:
    """One line of JSON for each failure, and one in the end with what happened in all of them."""
    counts: Counter[str] = Counter()
    digests = hashlib.sha256()
    began = time.process_time()
    failed = done = 0
    for seed in seeds:
        result = played(seed)
        scene = draw(seed).kind
        done += 1
        counts += result.counts
        counts[f"scene_{scene}"] += 1
        digests.update(result.digest.encode())
        if result.error is not None:
            failed += 1
            error = f"{type(result.error).__name__}: {result.error}"
            print(json.dumps({"seed": seed, "scene": scene, "error": error, "replay": command(seed)}), flush=True)
            if first_only:
                break
    spent_s = round(time.process_time() - began, 2)
    told = {"seeds": done, "failed": failed, "cpu_s": spent_s, "digest": digests.hexdigest()[:16]}
    print(json.dumps(told | {"counts": dict(sorted(counts.items()))}))
    return 1 if failed else 0


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="replay this one and show what breaks")
    which.add_argument("--seeds", type=seeds_of, metavar="A-B", help="play all of these")
    parser.add_argument("--verbose", action="store_true", help="with --seed: print the whole schedule")
    parser.add_argument("--first", action="store_true", help="with --seeds: stop at the first that fails")
    given = parser.parse_args()
    return replay(given.seed, given.verbose) if given.seeds is None else play_all(given.seeds, given.first)


if __name__ == "__main__":
    sys.exit(main())
