"""The simulation's parts are modules beside the tests: they are found whatever the import mode is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
