"""The coordinator's server: gRPC services, certificate authority, and the store of runs."""
