"""A 64-bit ARM board without a board: an emulated agent in a ring with one of this machine, see ``make arm64``.

::

    ROOT   Debian for arm64, unpacked and never booted        SITE   wheels for arm64, torch among them
    qemu-aarch64-static -L ROOT ROOT/usr/bin/python3 ...      runs ``ringtune`` of this checkout on them

Emulated arithmetic is 50 to 100 times slower than native, so a few steps of a small model are the right size.
"""
