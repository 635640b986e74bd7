"""The broken zoo is a distribution that nobody installs; its tests find it beside them."""

import signal
import sys
from pathlib import Path

# What a shell starts in the background ignores SIGINT, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))
