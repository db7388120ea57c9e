"""Certificates, keys and requests that somebody has made up: an error of ours, and none of the library's."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable

import pytest

from ringtune.errors import TrustError
from ringtune.transport.identity import (
    facts_of,
    fingerprint,
    has_key,
    is_issued_by,
    make_key,
    make_request,
    read_key,
    requested_key,
)
from tests.support.cases import cases
from tests.support.trust_parts import AUTHORITY, credentials_of

WHO = credentials_of("pi-4").identity
P_256 = bytes.fromhex("06082a8648ce3d030107")
OF_NO_CURVE = bytes.fromhex("06082a8648ce3d03017f")


def changed(pem: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A PEM text whose content is changed."""
    first, *lines, last = pem.decode().splitlines()
    content = base64.encodebytes(change(base64.b64decode("".join(lines)))).decode()
    return f"{first}\n{content}{last}\n".encode()


def of_no_curve(content: bytes) -> bytes:
    """A key of a curve that nobody knows."""
    assert P_256 in content
    return content.replace(P_256, OF_NO_CURVE)


def of_no_point(content: bytes) -> bytes:
    """A public key that is no point of its curve."""
    begin = content.index(P_256) + len(P_256) + 4
    return content[:begin] + bytes(64) + content[begin + 64 :]


@cases("change", [of_no_curve, of_no_point, lambda content: content[:-9], lambda content: b""])
def test_certificates_that_are_made_up_are_an_error_of_ours(change: Callable[[bytes], bytes]) -> None:
    """A stranger may send any request, and an identity may be any file; found by fuzzing."""
    with pytest.raises(TrustError):
        requested_key(changed(make_request(make_key()), change))
    with pytest.raises(TrustError):
        has_key(changed(WHO.certificate_pem, change), WHO.key_pem)


def of_no_version(content: bytes) -> bytes:
    """A certificate, or a request, of version 6."""
    begin = content.index(b"\x02\x01", 4, 20)
    return content[: begin + 2] + b"\x05" + content[begin + 3 :]


def named_twice(content: bytes) -> bytes:
    """A certificate that has the extension with its bearer's names twice."""
    uses, names = b"\x55\x1d\x25", b"\x55\x1d\x11"
    assert uses in content
    return content.replace(uses, names)


def of_no_text(content: bytes) -> bytes:
    """A certificate whose bearer's name is of a type that is no text."""
    name = b"\x0c\x04pi-4"
    assert name in content
    return content.replace(name, b"\x02" + name[1:])


def test_certificates_that_are_odd_are_an_error_of_ours() -> None:
    """The library has errors for these that are no others of its own; found by fuzzing."""
    for change in (of_no_version, named_twice, of_no_text):
        with pytest.raises(TrustError):
            facts_of(changed(WHO.certificate_pem, change))
    with pytest.raises(TrustError):
        requested_key(changed(make_request(make_key()), of_no_version))
    with pytest.raises(TrustError, match="a private key can't be read"):
        read_key(changed(WHO.key_pem, of_no_curve))


def test_certificate_of_an_authority_without_a_usable_key_has_signed_nothing() -> None:
    """It is read, and says nothing of anybody."""
    authority = changed(AUTHORITY.certificate_pem, of_no_curve)
    assert fingerprint(authority) == fingerprint(
        ssl.DER_cert_to_PEM_cert(base64.b64decode("".join(authority.decode().splitlines()[1:-1]))).encode()
    )
    assert not is_issued_by(WHO.certificate_pem, authority)
    assert is_issued_by(WHO.certificate_pem, AUTHORITY.certificate_pem)
