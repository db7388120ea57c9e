"""The rules of a run, shared by every party: pure Python without torch.

Only ``ringtune.rpc`` and the generated stubs in ``ringtune.v1`` talk to grpc.
"""

__version__ = "0.2.0"
