"""The broken zoo is a distribution that nobody installs; its tests find it beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))
