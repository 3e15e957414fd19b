"""What is looked for in everything that a server says and at what it grows by, while it is told nonsense."""

import re
from pathlib import Path
from typing import Final

from tests.end_to_end.served import Served

LEAKS: Final = re.compile(r"/dev/shm|psm_|/tmp|Traceback|0x[0-9a-f]{8}|File \"")
TOLD_WITHIN_S: Final = 0.25
GROWTH_BYTES: Final = 32 << 20


def rss(server: Served) -> int:
    """Resident bytes of the server's own process."""
    (line,) = [line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024
