"""The Python API: the commands as functions, for scripts and notebooks.

``import ringtune`` finds the names by entry point and loads nothing of this package before a name is used.
"""

import os

# Our errors say more than the log lines of gRPC's C core, which reads this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
