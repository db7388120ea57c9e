"""Prepare the example of HiFT: images and vision transformer of the image example, in a folder of its own.

``python -m docs.examples.hift.prepare`` leaves what ``docs.examples.fashion.prepare`` leaves.
"""

from __future__ import annotations

import sys

from docs.examples.fashion.prepare import prepare
from docs.examples.prepare_parts import main

if __name__ == "__main__":
    sys.exit(main("hift", prepare))
