"""The Python API: the verbs of the command line as functions, for scripts and notebooks.

``import ringtune`` finds the names by entry point, so this package loads nothing before one of them is asked for.
"""

import os

# Our errors say more than what the C core logs beside them; it reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
