"""gRPC options of every channel and server, as plain tuples; this module does not import grpc.

Each value answers a behaviour that was measured on grpcio 1.85:

* A ping, and its answer, wait behind data that fill the sockets and the queue of a router: behind a link of 2 Mbit/s
  with two seconds of queue they take more than 5 s. So pings only free what is left of dead connections, after a
  minute; that a node is lost is the lease's to say, which is heard of in small messages of their own.
* Two servers bind one port silently unless ``so_reuseport`` is 0; calls are then split between them.
* Built-in retries stop working above 256 KiB, so they are off: what may be repeated is ours to say.
* After an outage the default back-off keeps a healed link down for half a minute.
* One connection may open thousands of streams, each of which takes a worker.
* A connection that has begun a handshake costs 45 KiB, and may take two minutes for it: so many at a time, and a third
  of a minute, which is more than a slow link takes. One that has said nothing costs nothing (``listening``).
* A message above the limit is refused before it is read; payloads travel in chunks far below it.
* ``http_proxy``, ``https_proxy`` and ``grpc_proxy`` send even calls to this machine's own address to a proxy, and
  ``GRPC_ADDRESS_HTTP_PROXY`` does whatever ``enable_http_proxy`` says: nodes are reached where they listen.
"""

from __future__ import annotations

from typing import Final

Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""Longest single message; tensors and files travel in chunks of about 1 MiB."""

MAX_CONNECTIONS: Final = 1024
"""Connections to a server at a time, as many as it carries out calls; further ones are closed."""

MAX_STREAMS: Final = 200
"""Calls of one connection at a time; more wait at the caller. A node has a handful with each other one."""

_MESSAGES: Final[Options] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_PATIENCE_MS: Final = 60_000
"""How long a ping, and sent bytes that are not acknowledged, may stay unanswered."""

_KEEPALIVE: Final[Options] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PATIENCE_MS),
    ("grpc.http2.ping_timeout_ms", _PATIENCE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: Final[Options] = (
    *_MESSAGES,
    *_KEEPALIVE,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.address_http_proxy_enabled_addresses", ""),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long an attempt may take, with the handshakes of a slow link
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
"""For ``grpc.insecure_channel(address, options=CLIENT_OPTIONS)``."""

PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "GRPC_ADDRESS_HTTP_PROXY")
"""Variables that name a proxy; ``CLIENT_OPTIONS`` make calls ignore them, fetching from a hub follows them."""

SERVER_OPTIONS: Final[Options] = (
    *_MESSAGES,
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""For ``grpc.server(pool, options=SERVER_OPTIONS)``; a busy port then raises at bind."""
