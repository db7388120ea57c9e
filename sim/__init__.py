"""Runs of the ring on a virtual clock: the very engine and round code, without torch or grpc."""
