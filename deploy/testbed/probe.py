"""What ``verify`` starts inside the boards: a server, a sender, round trips, a processor burner. Needs only Python.

    probe.py serve HOST PORT              until it is ended
    probe.py send HOST PORT SECONDS       {"bytes_per_s": payload as the receiver counted it}
    probe.py ping HOST PORT COUNT         {"median_s": ..., "p90_s": ...}
    probe.py burn SECONDS                 {"cpu_cores": ...}

The first byte of a connection says what it is for: ``S`` count what comes, ``E`` send it back.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

_CHUNK_BYTES = 1 << 18
_PING_BYTES = 64
_CONNECT_S = 15.0
_RETRY_S = 0.1
_SILENCE_S = 30.0
# Slow start and the first bucket are over by then.
_SETTLE_S = 0.5


def serve(host: str, port: int) -> None:
    """Answer until the process is ended."""
    with socket.create_server((host, port)) as server:
        while True:
            connection, _ = server.accept()
            connection.settimeout(_SILENCE_S)
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        kind = connection.recv(1)
        if kind == b"S":
            connection.sendall(json.dumps({"bytes_per_s": _count(connection)}).encode())
        elif kind == b"E":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while received := connection.recv(_PING_BYTES):
                connection.sendall(received)


def _count(connection: socket.socket) -> float:
    """Bytes per second from the settling to the last byte."""
    buffer = bytearray(_CHUNK_BYTES)
    began_s = time.monotonic()
    first_s, last_s, count = 0.0, 0.0, 0
    while size := connection.recv_into(buffer):
        now_s = time.monotonic()
        if now_s < began_s + _SETTLE_S:
            continue
        if first_s:
            count += size
            last_s = now_s
        else:
            first_s = now_s
    return count / (last_s - first_s) if last_s > first_s else 0.0


def send(host: str, port: int, duration_s: float) -> dict[str, float]:
    """Send as fast as the link takes it."""
    chunk = bytes(_CHUNK_BYTES)
    with _connect(host, port) as connection:
        connection.sendall(b"S")
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        return dict(json.loads(connection.recv(_CHUNK_BYTES)))


def ping(host: str, port: int, count: int) -> dict[str, float]:
    """Round trips of a few bytes, one after the other."""
    took_s = []
    with _connect(host, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"E")
        for _ in range(count):
            sent_s = time.monotonic()
            connection.sendall(bytes(_PING_BYTES))
            missing = _PING_BYTES
            while missing:
                missing -= len(connection.recv(missing)) or _fail(f"{host} closed the connection")
            took_s.append(time.monotonic() - sent_s)
    return {"median_s": statistics.median(took_s), "p90_s": statistics.quantiles(took_s, n=10)[-1]}


def burn(duration_s: float) -> dict[str, float]:
    """Use all the processor time that there is."""
    began_s, used_s = time.monotonic(), time.process_time()
    while time.monotonic() < began_s + duration_s:
        pass
    return {"cpu_cores": (time.process_time() - used_s) / (time.monotonic() - began_s)}


def _connect(host: str, port: int) -> socket.socket:
    """Connect; a server that is not ready yet is waited for."""
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT_S)
            connection.settimeout(_SILENCE_S)
            return connection
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_RETRY_S)


def _fail(reason: str) -> int:
    raise ConnectionError(reason)


def main(words: list[str]) -> None:
    """Do what the command line says and print a JSON line."""
    match words:
        case ["serve", host, port]:
            serve(host, int(port))
        case ["send", host, port, seconds]:
            sys.stdout.write(json.dumps(send(host, int(port), float(seconds))) + "\n")
        case ["ping", host, port, count]:
            sys.stdout.write(json.dumps(ping(host, int(port), int(count))) + "\n")
        case ["burn", seconds]:
            sys.stdout.write(json.dumps(burn(float(seconds))) + "\n")
        case _:
            sys.exit(f"error: {' '.join(words)!r} makes no sense; see the top of this file")


if __name__ == "__main__":
    main(sys.argv[1:])
