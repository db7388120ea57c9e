"""A Linux machine as several boards: what they may compute, hold and send is limited, the code is the real one.

Each board is a network namespace with a shaped link to a bridge and a control group with a processor quota and a
memory limit. The bridge, the coordinator and the command under test live in one more namespace, the hub, so that
neither the machine's own addresses nor its firewall nor its network are touched::

    hub    br0 10.117.0.1 ---- p0 ~~~~ eth0 10.117.0.2    board 0      ~~~~  shaped at both ends:
                          ---- p1 ~~~~ eth0 10.117.0.3    board 1            eth0 sends at the board's up rate,
                          ---- ...                                           the port p0 at its down rate

Not a part of the distribution: it is run from a checkout, ``python -m deploy.testbed``.
"""

from deploy.testbed.boards import Board, Layout, load_layout
from deploy.testbed.capabilities import MissingCapability
from deploy.testbed.testbed import Testbed

__all__ = ["Board", "Layout", "MissingCapability", "Testbed", "load_layout"]
