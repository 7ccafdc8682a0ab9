"""Signatures in minisign's format: what a trusted key signed is used, byte for byte, and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from flashgen.core import signatures
from flashgen.core.errors import DatabaseError, SettingError
from flashgen.core.settings import settings
from flashgen.core.signatures import parse_key, parse_signature, signed_copy
from tests.fakes.minisign import Signer

OURS, OTHERS = Signer(1), Signer(2)
CONTENT = b"records " * 500_000
"""More than one piece of what is read at once."""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy, and the folder of trusted keys, which has one."""
    folder = tmp_path / "keys"
    OURS.publish(folder / "ours.pub")
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(folder))
    settings.cache_clear()
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A signed file."""
    path = tmp_path / "theirs.sqlite3"
    path.write_bytes(CONTENT)
    OURS.sign(path)
    return path


def edited(path: Path, line: int, change: Callable[[bytes], bytes]) -> None:
    """Change a line of the signature of a file."""
    beside = path.with_name(path.name + ".minisig")
    lines = beside.read_bytes().split(b"\n")
    lines[line] = change(lines[line])
    beside.write_bytes(b"\n".join(lines))


def recoded(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda line: base64.b64encode(change(base64.b64decode(line)))


@pytest.mark.usefixtures("keys")
def test_what_is_signed_is_used_from_a_copy(path: Path) -> None:
    copy = signed_copy(path)
    assert copy.read_bytes() == CONTENT
    assert copy.parent == settings().cache_dir / "signed"
    seen = copy.stat()
    assert signed_copy(path) == copy
    assert copy.stat().st_mtime_ns == seen.st_mtime_ns, "it is made once"
    path.write_bytes(b"something else")
    assert copy.read_bytes() == CONTENT


def test_a_signature_that_minisign_made_holds(tmp_path: Path) -> None:
    """Key and signature are those in the documentation of minisign-verify."""
    key = parse_key(
        b"untrusted comment: minisign public key E7620F1842B4E81F\n"
        b"RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n",
        tmp_path,
    )
    assert key.name == "E7620F1842B4E81F"
    found = parse_signature(
        b"untrusted comment: signature from minisign secret key\n"
        b"RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
        b"trusted comment: timestamp:1556193335\tfile:test\n"
        b"y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n",
        tmp_path,
    )
    signatures._verify(key, found, hashlib.blake2b(b"test").digest(), tmp_path)
    with pytest.raises(DatabaseError, match="was changed since key E7620F1842B4E81F signed it"):
        signatures._verify(key, found, hashlib.blake2b(b"Test").digest(), tmp_path)


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no signature": (lambda path: path.with_name(path.name + ".minisig").unlink(), "minisig is missing"),
    "another key": (OTHERS.sign, "is a trusted one (0101010101010101); .* is by 0202020202020202"),
    "another key under the name of ours": (
        lambda path: [OTHERS.sign(path), edited(path, 1, recoded(lambda raw: raw[:2] + OURS.key_id + raw[10:]))],
        "was changed since",
    ),
    "a changed byte": (lambda path: path.write_bytes(CONTENT[:-1] + b"!"), "was changed since"),
    "a byte more": (lambda path: path.write_bytes(CONTENT + b"\0"), "was changed since"),
    "an empty file": (lambda path: path.write_bytes(b""), "was changed since"),
    "the signature of another file": (
        lambda path: path.with_name(path.name + ".minisig").write_bytes(OURS.text(b"another file")),
        "the signature is that of another file",
    ),
    "a changed comment": (lambda path: edited(path, 2, lambda line: line + b" v2"), "comment .* was changed"),
    "the comment of another signature": (
        lambda path: edited(path, 3, lambda line: OURS.text(b"x").split(b"\n")[3]),
        "comment .* was changed",
    ),
    "a signature of zeros": (
        lambda path: edited(path, 1, recoded(lambda raw: raw[:10] + bytes(64))),
        "was changed since",
    ),
    "a kind of before": (lambda path: edited(path, 1, recoded(lambda raw: b"Ed" + raw[2:])), "of a hash"),
    "an unknown kind": (lambda path: edited(path, 1, recoded(lambda raw: b"XX" + raw[2:])), "one of Ed25519"),
    "too short": (lambda path: edited(path, 1, recoded(lambda raw: raw[:-1])), "one of Ed25519"),
    "no base64": (lambda path: edited(path, 1, lambda line: b"\x1b[2J" + line), r"base64, which b'\\x1b\[2J"),
    "a line less": (lambda path: path.with_name(path.name + ".minisig").write_bytes(b"untrusted comment: x\n"), "four"),
    "a flood": (lambda path: path.with_name(path.name + ".minisig").write_bytes(b"x" * 10**6), "at most 16384"),
}


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_signed_by_a_trusted_key_is_refused(path: Path, attack: str) -> None:
    act, rule = ATTACKS[attack]
    act(path)
    with pytest.raises(DatabaseError, match=rule.replace("(0101010101010101)", r"\(0101010101010101\)")) as caught:
        signed_copy(path)
    assert str(path) in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert not list((settings().cache_dir / "signed").glob("*"))


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
def test_what_is_no_ordinary_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd.sqlite3"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(DatabaseError, match=r"odd\.sqlite3"):
        signed_copy(path)


@pytest.mark.usefixtures("keys")
def test_a_file_that_changes_between_its_check_and_its_copy_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(digest: bytes, asked: Path) -> object:
        found = real(digest, asked)
        path.write_bytes(b"exchanged")
        return found

    real = signatures.check
    monkeypatch.setattr(signatures, "check", checked)
    with pytest.raises(DatabaseError, match="stays as it is while it is read"):
        signed_copy(path)
    assert not list((settings().cache_dir / "signed").glob("*"))


@pytest.mark.usefixtures("keys")
def test_a_file_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "MOST_BYTES", 1000)
    with pytest.raises(DatabaseError, match="at most 0 GiB"):
        signed_copy(path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"", "public key of minisign's"),
        (b"untrusted comment: x\n" + base64.b64encode(b"Ed" + bytes(39)), "public key of minisign's"),
        (b"untrusted comment: x\n\x1b]0;t\x07", "base64"),
        (b"k" * 20_000, "at most 16384"),
    ],
)
def test_a_key_that_is_none_stops_everything(path: Path, keys: Path, text: bytes, rule: str) -> None:
    (keys / "another.pub").write_bytes(text)
    with pytest.raises(DatabaseError, match=rule):
        signed_copy(path)


def test_keys_are_a_folder_or_a_file(path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OTHERS.publish(keys / "theirs.pub")
    (keys / "README").write_text("no key")
    assert signed_copy(path)
    for place, rule in ((keys / "theirs.pub", "0202020202020202"), (keys / "none", "No such file")):
        monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(place))
        settings.cache_clear()
        with pytest.raises(DatabaseError, match=rule):
            signed_copy(path)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")
def test_keys_that_others_can_change_are_none(path: Path, keys: Path) -> None:
    for place in (keys / "ours.pub", keys):
        place.chmod(0o777)
        with pytest.raises(DatabaseError, match="this user or root alone"):
            signed_copy(path)
        place.chmod(0o755)
    assert signed_copy(path)


def test_the_policy_needs_keys(path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (keys / "ours.pub").unlink()
    with pytest.raises(DatabaseError, match=r"a trusted one \(none\)"):
        signed_copy(path)
    monkeypatch.delenv("FLASHGEN_TRUSTED_KEYS")
    settings.cache_clear()
    with pytest.raises(DatabaseError, match="FLASHGEN_TRUSTED_KEYS, which is not set"):
        signed_copy(path)
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "yes")
    settings.cache_clear()
    with pytest.raises(SettingError, match="FLASHGEN_SIGNATURES is required or not set, got 'yes'"):
        settings()


@pytest.mark.usefixtures("keys")
def test_the_library_is_an_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(DatabaseError, match=r"pip install 'flashgen\[signatures\]'"):
        signed_copy(path)
