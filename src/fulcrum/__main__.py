"""The command `fulcrum`, also as `python -m fulcrum`: a small beginning, so that Ctrl-C is a sentence from the start.

PyTorch takes a second to import. Until the command line is there nothing was begun, so Ctrl-C may leave at once; an
interrupted import would else end in a traceback of somebody's library.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the command line and return its exit code."""
    before = signal.signal(signal.SIGINT, _leave)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's notes about the machine are not for users
    from fulcrum import cli

    cli.preload(sys.argv[1:])
    signal.signal(signal.SIGINT, before)
    return cli.main()


def _leave(*_: Any) -> None:
    os.write(2, b"interrupted; nothing was begun.\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
