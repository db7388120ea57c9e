"""Import path of ``load_auxiliary`` in model cards of earlier versions; it warns and forwards."""

from __future__ import annotations

import warnings

from edge.model.auxiliary import load_auxiliary

__all__ = ["load_auxiliary"]
warnings.warn("import load_auxiliary from edge.model.auxiliary; this module will go", FutureWarning, stacklevel=2)
