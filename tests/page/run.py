"""``python -m tests.page.run``: find or install what the browser's tests need, then run them.

Needed are Chromium (Debian's ``chromium``) and ``playwright``, which drives it. Root gets them by apt and pip;
otherwise it is said what is missing, and nothing is tested. Pictures are in build/page.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 900.0


def browser() -> str:
    """The path of a Chromium; empty if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), "")


def prepare() -> str:
    """Install what is missing; say what is missing still, empty if nothing is."""
    if not browser() and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        subprocess.run(command, timeout=WAIT_S, check=False)  # noqa: S603 - a fixed command
    if not browser():
        return "no Chromium here; install it, e.g. 'apt-get install chromium'"
    if importlib.util.find_spec("playwright") is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "playwright>=1.65,<2"]
        subprocess.run(command, timeout=WAIT_S, check=False)  # noqa: S603 - a fixed command
        importlib.invalidate_caches()
    return "" if importlib.util.find_spec("playwright") else "no playwright here; pip install playwright"


def main() -> int:
    """Run the tests; 0 as well where something is missing, which is said."""
    if missing := prepare():
        sys.stdout.write(f"the page is not tested in a browser: {missing}\n")
        return 0
    environment = {**os.environ, "RINGTUNE_BROWSER": browser()}
    command = [sys.executable, "-m", "pytest", "-q", "tests/page", *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - our own tests


if __name__ == "__main__":
    sys.exit(main())
