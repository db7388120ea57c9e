"""``python -m edge.runtime MODULE WORDS``: run a module of this package that writes lines of JSON.

Standard output has its lines alone: what libraries print, at their import or later, and what processes below write goes
to standard error. Hence libraries are imported once that is set up.
"""

import importlib
import sys

from ringtune.machine.process import keep_output

if __name__ == "__main__":
    output = keep_output()
    sys.exit(importlib.import_module(f"edge.runtime.{sys.argv[1]}").main(sys.argv[2:], output))
