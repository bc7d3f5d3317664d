"""`python -m fulcrum` is the command `fulcrum`."""

from __future__ import annotations

import sys

from fulcrum.cli import main

if __name__ == "__main__":
    sys.exit(main())
