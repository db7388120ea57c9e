"""Name base weights by digest, and say them in messages, for both ends of a fetch.

``edge.weights`` fetches and keeps them. Nothing here opens a connection.
"""
