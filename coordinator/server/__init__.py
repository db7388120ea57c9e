"""The coordinator's server: gRPC services, certificate authority, and the runs that it keeps on disk."""
