"""Signatures of files that others give away, in minisign's format, checked without a network.

Where `FLASHGEN_SIGNATURES=required`, a file of others is used only if a file `<name>.minisig` beside it has a signature
of its bytes by one of the public keys in `FLASHGEN_TRUSTED_KEYS`. What is then used is a copy in a folder of this
user's, of just the bytes that were signed: the file itself may change at any time.

    untrusted comment: <text>
    base64(algorithm "ED", 8 bytes of the key's id, 64 bytes: Ed25519 of the BLAKE2b-512 of the file)
    trusted comment: <text>
    base64(64 bytes: Ed25519 of the first signature and the trusted comment)

`minisign -S` writes such files since version 0.10; the key pair is made by `minisign -G`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import is_own_file, remove_abandoned, why_others_change, write_stream
from flashgen.core.quoting import shown
from flashgen.core.settings import REQUIRED, cache_folder, settings

SUFFIX = ".minisig"
FOLDER = "signed"
"""Of the cache: copies of what was signed, by their digests."""

MOST_BYTES = 4 * 2**30
"""Of a file that is signed."""

MOST_TEXT_BYTES = 16384
"""Of a signature or of a key; minisign's comments have at most 8192."""

MOST_KEYS = 1000
_CHUNK = 2**20
_KEY_ALGORITHM, _ALGORITHM, _LEGACY = b"Ed", b"ED", b"Ed"
_COMMENT, _TRUSTED = b"untrusted comment: ", b"trusted comment: "


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A public key of minisign's: its id and 32 bytes of Ed25519."""

    key_id: bytes
    key: bytes

    @property
    def name(self) -> str:
        """The id as minisign prints it."""
        return _named(self.key_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a file `<name>.minisig` states, not checked yet."""

    key_id: bytes
    signature: bytes
    trusted_comment: bytes
    comment_signature: bytes


def signed_copy(path: Path, folder: Path | None = None) -> Path:
    """A copy of the bytes of `path` that a trusted key has signed, in `folder`, or in the cache, where it stays.

    Raises:
        DatabaseError: there is no signature, or none of these bytes by a trusted key.
    """
    try:
        digest = _digest(path)
        check(digest, path)
        place = cache_folder(FOLDER) if folder is None else folder
        remove_abandoned(place)
        copy = place / f"{digest.hex()[:64]}{path.suffix}"
        if not is_own_file(copy):
            _copy(path, copy, digest)
    except OSError as error:
        raise DatabaseError(f"a signed file is one that can be read, and copied; {path}: {error}") from error
    return copy


def check(digest: bytes, path: Path) -> PublicKey:
    """The trusted key that signed a file.

    Args:
        digest: BLAKE2b-512 of the file.
        path: the file, beside which its signature lies.

    Raises:
        DatabaseError: nobody did whom `FLASHGEN_TRUSTED_KEYS` names; the message says what is wrong.
        OSError: the signature cannot be read.
    """
    beside = path.with_name(path.name + SUFFIX)
    if not beside.exists():
        raise DatabaseError(
            f"FLASHGEN_SIGNATURES={REQUIRED}: a file of others is signed by a trusted key; {beside} is missing "
            f"(`minisign -Sm` writes it)"
        )
    found = parse_signature(_text(beside), beside)
    keys = {key.key_id: key for key in trusted_keys()}
    key = keys.get(found.key_id)
    if key is None:
        listed = ", ".join(sorted(each.name for each in keys.values())) or "none"
        raise DatabaseError(
            f"FLASHGEN_SIGNATURES={REQUIRED}: the key of a signature is a trusted one ({listed}); {beside} is by "
            f"{_named(found.key_id)}"
        )
    _verify(key, found, digest, path)
    return key


def trusted_keys() -> tuple[PublicKey, ...]:
    """The keys in `FLASHGEN_TRUSTED_KEYS`: a file, or a folder of files whose names end in `.pub`.

    Raises:
        DatabaseError: a file is no key, or others can change what is trusted.
        OSError: it cannot be read.
    """
    place = settings().trusted_keys
    if place is None:
        raise DatabaseError(
            f"FLASHGEN_SIGNATURES={REQUIRED} needs public keys in FLASHGEN_TRUSTED_KEYS, which is not set"
        )
    paths = sorted(place.glob("*.pub")) if place.is_dir() else [place]
    if len(paths) > MOST_KEYS:
        raise DatabaseError(f"at most {MOST_KEYS} keys are trusted, got {len(paths)} in {place}")
    for each in (place, *paths):
        reason = why_others_change(each)
        if reason is not None:
            raise DatabaseError(f"FLASHGEN_TRUSTED_KEYS is what this user or root alone can change; {reason}")
    return tuple(parse_key(_text(each), each) for each in paths)


def parse_key(text: bytes, path: Path) -> PublicKey:
    """Read a public key as minisign writes it: a line with a comment and one in base64.

    Raises:
        DatabaseError: it is none.
    """
    lines = text.split(b"\n")
    raw = _decoded(lines[1], path) if len(lines) > 1 and lines[0].startswith(_COMMENT) else b""
    if len(raw) != 42 or not raw.startswith(_KEY_ALGORITHM):
        raise DatabaseError(f"a trusted key is a public key of minisign's (`minisign -G`), which {path} is not")
    return PublicKey(key_id=raw[2:10], key=raw[10:])


def parse_signature(text: bytes, path: Path) -> Signature:
    """Read a signature as minisign writes it.

    Raises:
        DatabaseError: it is none, or one of the whole file instead of its hash, as minisign before 0.10 wrote them.
    """
    lines = text.split(b"\n")
    if len(lines) < 4 or not lines[0].startswith(_COMMENT) or not lines[2].startswith(_TRUSTED):
        raise DatabaseError(f"a signature has the four lines that `minisign -S` writes, which {path} has not")
    raw, whole = _decoded(lines[1], path), _decoded(lines[3], path)
    if raw[:2] == _LEGACY:
        raise DatabaseError(f"a signature is of a hash (minisign 0.10 and later, or -H); {path} is of an earlier kind")
    if len(raw) != 74 or raw[:2] != _ALGORITHM or len(whole) != 64:
        raise DatabaseError(f"a signature is one of Ed25519 by minisign, which {path} is not")
    comment = lines[2][len(_TRUSTED) :].removesuffix(b"\r")
    return Signature(key_id=raw[2:10], signature=raw[10:], trusted_comment=comment, comment_signature=whole)


def _verify(key: PublicKey, found: Signature, digest: bytes, path: Path) -> None:
    holds = _verifier(key)
    if not holds(found.signature, digest):
        raise DatabaseError(
            f"a signature is of the bytes of its file; {path} was changed since key {key.name} signed it, or the "
            "signature is that of another file"
        )
    if not holds(found.comment_signature, found.signature + found.trusted_comment):
        raise DatabaseError(f"the trusted comment of a signature is signed, too; that of {path} was changed")


def _verifier(key: PublicKey) -> Callable[[bytes, bytes], bool]:
    """Whether a signature by this key is of a message.

    Raises:
        DatabaseError: no library is installed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise DatabaseError("signatures are checked by cryptography: pip install 'flashgen[signatures]'") from error
    public = Ed25519PublicKey.from_public_bytes(key.key)

    def holds(signature: bytes, message: bytes) -> bool:
        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return holds


def _named(key_id: bytes) -> str:
    return key_id[::-1].hex().upper()


def _decoded(line: bytes, path: Path) -> bytes:
    try:
        return base64.b64decode(line.strip(), validate=True)
    except binascii.Error as error:
        raise DatabaseError(f"keys and signatures are in base64, which {shown(line)} of {path} is not") from error


def _text(path: Path) -> bytes:
    with _opened(path) as file:
        text = file.read(MOST_TEXT_BYTES + 1)
    if len(text) > MOST_TEXT_BYTES:
        raise DatabaseError(f"a key or a signature has at most {MOST_TEXT_BYTES} bytes, which {path} has not")
    return text


def _digest(path: Path) -> bytes:
    hashed = hashlib.blake2b()
    for chunk in _chunks(path):
        hashed.update(chunk)
    return hashed.digest()


def _copy(path: Path, copy: Path, digest: bytes) -> None:
    """Copy what was hashed, and nothing that came since."""
    hashed = hashlib.blake2b()

    def chunks() -> Iterator[bytes]:
        for chunk in _chunks(path):
            hashed.update(chunk)
            yield chunk
        if hashed.digest() != digest:
            raise DatabaseError(f"a signed file stays as it is while it is read; {path} has changed")

    write_stream(copy, chunks())


def _chunks(path: Path) -> Iterator[bytes]:
    left = MOST_BYTES
    with _opened(path) as file:
        while chunk := file.read(_CHUNK):
            left -= len(chunk)
            if left < 0:
                raise DatabaseError(f"a signed file has at most {MOST_BYTES >> 30} GiB, which {path} has not")
            yield chunk


def _opened(path: Path) -> BinaryIO:
    """An ordinary file; a pipe would be waited for, and a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatabaseError(f"a signed file, its signature and a key are ordinary files, which {path} is not")
    return os.fdopen(descriptor, "rb")
