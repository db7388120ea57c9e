"""Writing TOML: whatever is written is read back by the standard library."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.files.toml_text import toml_value, write_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT


@given(value=SCALAR | st.lists(SCALAR))
def test_toml_value_is_read_back(value: object) -> None:
    """Texts with any character, numbers of any size, lists of them."""
    back = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert back == value
    assert type(back) is type(value)


def test_write_toml_leaves_out_none_and_keeps_order() -> None:
    """One table after another, in the order given."""
    assert write_toml({"b": {"y": 1, "x": None}, "a": {"z": (1.5, 2)}}) == "[b]\ny = 1\n\n[a]\nz = [1.5, 2]\n"


def test_toml_value_refuses_what_toml_has_not() -> None:
    """No silent repr of an unknown object."""
    with pytest.raises(TypeError, match="TOML has no form for object"):
        toml_value(object())
