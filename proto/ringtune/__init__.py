"""The rules of a run, shared by every party: pure Python, no torch, no grpc, no clock."""

__version__ = "0.2.0"
