"""What `minisign -G` and `minisign -S` write, for tests: key pairs and signatures of files."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Signer:
    """A key pair, the same one for the same number."""

    def __init__(self, number: int = 1) -> None:
        self.key_id = bytes([number]) * 8
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)

    def publish(self, path: Path) -> Path:
        """Write the public key."""
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = b"Ed" + self.key_id + self._key.public_key().public_bytes_raw()
        path.write_bytes(b"untrusted comment: a key\n" + base64.b64encode(raw) + b"\n")
        return path

    def text(self, content: bytes, comment: bytes = b"timestamp:1\tfile:x") -> bytes:
        """The signature of some bytes."""
        signature = self._key.sign(hashlib.blake2b(content).digest())
        lines = [
            b"untrusted comment: signature from minisign secret key",
            base64.b64encode(b"ED" + self.key_id + signature),
            b"trusted comment: " + comment,
            base64.b64encode(self._key.sign(signature + comment)),
        ]
        return b"\n".join(lines) + b"\n"

    def sign(self, path: Path) -> Path:
        """Write the signature of a file beside it."""
        beside = path.with_name(path.name + ".minisig")
        beside.write_bytes(self.text(path.read_bytes()))
        return beside
