"""The coordinator: who is a member, who hosts what, and driving a run from its start to its files.

It never imports torch or the agent; it talks to agents over gRPC only.
"""
