"""Random bundles and files of calls: whatever their JSON holds, they are read or refused, soon and in few words."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter
from flashgen.codegen.render import KernelSource
from flashgen.core.calls import CallRecord, add_calls, read_calls
from flashgen.core.errors import FlashgenError
from flashgen.core.settings import settings
from flashgen.launch import binaries, bundles
from tests.db.samples import CAUSAL, CONFIG, H200, SHORT

zstandard = pytest.importorskip("zstandard")

CASES = int(os.environ.get("FUZZ_CASES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
CASE_S = 5.0

KEY, OTHER_KEY = "a" * 64, "b" * 64
SPEC = KernelSpec(
    entry="f",
    parameters=(Parameter(name="x", type="*bf16"), Parameter(name="n", type="i32")),
    options=CompileOptions(num_warps=4, num_stages=2),
    programs=lambda device, sizes: 1,
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "x", "0", "\x1b[2J", "\0", "\ud800", "x" * 100_000, "../../x", "sm90", "sm80", "3.6.0", KEY, OTHER_KEY),
    *([], {}, [[]], [None], {"": {}}, [1, 1, 64, 64], ["sm90"] * 1000, {"x": 1e999}),
)
TEXTS = ("1e999", "-1e999", "NaN", "[" * 20_000, "1" * 5000, '"\\ud800"', "{}", "nul", '{"format":', "\x00")


def mutated(value: Any, chance: random.Random) -> Any:
    """Other JSON: some values, names or entries exchanged, left out, doubled or added."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 5))):
        holders = [each for each in _holders(value) if each]
        if not holders or chance.random() < 0.03:
            return chance.choice(VALUES)
        holder = chance.choice(holders)
        place = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        kind = chance.randrange(6)
        if kind == 0:
            del holder[place]
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[place]))
        elif kind == 2 and isinstance(holder, dict):
            holder[chance.choice(("x", "", "key", "target", "calls", "\x1b"))] = chance.choice(VALUES)
        else:
            holder[place] = chance.choice((*VALUES, *holders[:2])) if chance.random() < 0.9 else -7
    return value


def _holders(value: Any, depth: int = 0) -> list[Any]:
    if not isinstance(value, (dict, list)) or depth > 8:
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(each for one in inner for each in _holders(one, depth + 1))]


def text_of(value: Any, chance: random.Random) -> bytes:
    """It as JSON, sometimes with a piece of its text exchanged."""
    try:
        text = json.dumps(value)
    except ValueError:  # a value that holds itself, or an integer that Python does not write
        text = chance.choice(TEXTS)
    if chance.random() < 0.3:
        start = chance.randrange(len(text) + 1)
        text = text[:start] + chance.choice(TEXTS) + text[start + chance.choice((0, 1, 3, 20)) :]
    return text.encode("utf-8", "surrogatepass")


def kernel(key: str) -> bytes:
    """A file of one kernel whose binary is no binary."""
    metadata = SimpleNamespace(name="f", shared=1024, num_warps=4, tensordesc_meta=[])
    ptx = ".visible .entry f(.param .u64 x,.param .u32 n)"
    part = CompiledPart(
        kernel=SPEC,
        registers=32,
        spills=0,
        shared_bytes=1024,
        num_warps=4,
        compile_ms=1.0,
        handle=SimpleNamespace(metadata=metadata, asm={"cubin": b"code" * 9, "ptx": ptx}),
    )
    compiled = CompiledKernel(source=KernelSource(entry="f", text="text"), device=H200, parts=(part,))
    return binaries.packed(compiled, key)


def with_header(content: bytes, chance: random.Random) -> bytes:
    """The file of a kernel with another header, and the right checksum."""
    body = content[len(binaries.MAGIC) + 32 :]
    end = 8 + int.from_bytes(body[:8], "little")
    head = text_of(mutated(json.loads(body[8:end]), chance), chance)
    body = len(head).to_bytes(8, "little") + head + body[end:]
    return binaries.MAGIC + hashlib.sha256(body).digest() + body


def bundle(path: Path, chance: random.Random) -> None:
    """A bundle with another index, or with other headers of its kernels, under the right hashes."""
    contents = {key: kernel(key) for key in (KEY, OTHER_KEY)}
    if chance.random() < 0.5:
        contents[KEY] = with_header(contents[KEY], chance)
    entries = [bundles.Entry(key=key, content=content, target="sm90") for key, content in contents.items()]
    bundles.write(path, entries, ["sm90", "sm80"], "3.6.0")
    raw, start = path.read_bytes(), len(bundles.MAGIC) + 32
    length = int.from_bytes(raw[start : start + 8], "little")
    head, rest = json.loads(raw[start + 8 : start + 8 + length]), raw[start + 8 + length :]
    if chance.random() < 0.7:
        head = mutated(head, chance)
        text = text_of(head, chance)
        path.write_bytes(bundles.MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text + rest)


def said(error: FlashgenError) -> None:
    assert len(str(error)) < 2000
    assert str(error).replace("\n", " ").isprintable()


@pytest.fixture
def chance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> random.Random:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    return random.Random(SEED * 1_000_003 + request.node.callspec.params["number"])


@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES))
def test_any_bundle_is_taken_over_whole_or_refused(number: int, chance: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "x.kernels"
    bundle(path, chance)
    folder = settings().cache_dir / binaries.BUNDLES
    started = time.thread_time()
    try:
        taken = bundles.install(path, target=chance.choice(("sm90", None)))
    except FlashgenError as error:
        said(error)
        assert not list(folder.glob("*"))
    else:
        assert {file.name for file in folder.glob(f"*{binaries.SUFFIX}")} == {
            f"{key[:32]}.kernel" for key in taken.sizes
        }
    for key in (KEY, OTHER_KEY):
        found = binaries._read(binaries.BUNDLES, key, "f", lambda: (SPEC,), H200)
        assert found is None or 1 <= found.parts[0].num_warps <= 32
    assert time.thread_time() - started < CASE_S


@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES))
def test_any_file_of_calls_is_read_or_refused(number: int, chance: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    known = [
        CallRecord(
            workload=CAUSAL, device="sm90", rung=1, server=CONFIG.family, config=CONFIG, calls=3, call_ms=1.5,
            time_from="record",
        ),
        CallRecord(workload=SHORT, device="", rung=0, server="", calls=1),
    ]  # fmt: skip
    add_calls(path, known)
    path.write_bytes(text_of(mutated(json.loads(path.read_text()), chance), chance))
    before = path.read_bytes()
    started = time.thread_time()
    try:
        assert all(record.calls >= 1 for record in read_calls(path))
    except FlashgenError as error:
        said(error)
    try:
        add_calls(path, known)
    except FlashgenError:
        assert path.read_bytes() == before
    else:
        assert {record.identity for record in known} <= {record.identity for record in read_calls(path)}
    assert time.thread_time() - started < CASE_S
