"""Makes the gallery importable by its own name; it is no part of the installed distribution."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
