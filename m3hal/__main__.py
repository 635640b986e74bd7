"""``python -m m3hal``."""

import sys

from m3hal.cli import main

sys.exit(main())
