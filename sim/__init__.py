"""The simulator: runs of the ring on a virtual clock with the engine and round code of real runs; no torch, no grpc."""
