"""The page in a real browser: ``make page-test``; not in ``make test``, because it needs Chromium."""
