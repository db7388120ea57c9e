"""Run ``ringtune node`` as ``python -m edge``, without the commands of the other packages."""

from edge.cli.node import end, main

if __name__ == "__main__":
    end(main())
