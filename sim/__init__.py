"""The simulator: the ring on a virtual clock with engine and state machine of real runs; no torch, no grpc."""
