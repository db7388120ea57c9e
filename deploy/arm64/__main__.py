"""``python -m deploy.arm64``."""

from __future__ import annotations

import sys

from deploy.arm64.commands import main

if __name__ == "__main__":
    sys.exit(main())
