"""Events of a run, and who hears them.

A run says what happens as ``RunEvent`` messages. Both ends hand each of them to a list of sinks: at the coordinator the
status board and the way to the submitter, at the submitter the outcome, the run's folder and the screen. A further
reader is a further sink; driver and client stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from ringtune.v1 import control_pb2

EventSink = Callable[[control_pb2.RunEvent], None]
"""Takes one event; hears all of them, in order."""
