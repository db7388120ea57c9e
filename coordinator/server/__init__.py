"""The coordinator's server, its gRPC services, and the object that they call."""
