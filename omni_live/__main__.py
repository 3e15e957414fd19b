"""`python -m omni_live` is the command `omni-live`."""

from omni_live.cli import main

raise SystemExit(main())
