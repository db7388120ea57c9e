"""The data plane of a node: tensors as frames over long-lived gRPC streams, and probes of the links."""
