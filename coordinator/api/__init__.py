"""The Python API: the verbs of the command line as functions, for scripts and notebooks.

``import ringtune`` finds the names by entry point and loads nothing of this package before a name is used.
"""

import os

# Our errors say more than what the C core logs beside them; it reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
