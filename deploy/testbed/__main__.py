"""``python -m deploy.testbed``."""

from __future__ import annotations

import sys

from deploy.testbed.commands import main

if __name__ == "__main__":
    sys.exit(main())
