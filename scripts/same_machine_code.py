"""Whether a change of the templates left the machine code of tuned kernels alone: for maintainers of tuning_db/.

    python scripts/same_machine_code.py OLD_CHECKOUT --python PYTHON_OF_THE_TRITON_THAT_MEASURED [--write]

A record keeps the digest of its source, and counts as out of date once the template renders another text. Where only
comments, names or the layout of the text changed, the measured time is still that of the kernel. So every record of
every shipped database is rendered in both checkouts (this one and the old one), and where the texts differ both are
compiled, for the device of the record and with the Triton that measured it. Equal means the same instructions,
constants, registers, shared memory and launch of each kernel of the config; names of variables, line numbers and debug
information do not count. With `--by-syntax` texts are not compiled whose syntax trees are the same but for docstrings
and for names that the text itself gives to its functions, parameters and variables.

One line for each record that is not `current` already: `same`, or `different` with what differs. With `--write` the
digests of those that are the same are carried over to this checkout's database and its CSV; the others are to be timed
again. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODE_SECTIONS = (".text", ".nv.constant", ".nv.shared", ".nv.info", ".nv.callgraph", ".nv.global", ".rel")
"""Of a cubin: instructions, constants, static shared memory, what the driver is told of registers and parameters."""

BATCH = 16
"""Configs that one process compiles before what it found is kept."""

LEFT_OUT = (".nv.info.debug", ".rel.debug", ".rela.debug", ".rel.nv_debug", ".rela.nv_debug")

Row = dict[str, Any]
"""A record as JSON: its workload, device, config and digest, and the text and the syntax tree that it renders to."""


def main() -> int:
    """Compare all records; a line for each whose digest is not that of this checkout's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the commit that the records are current in")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the Triton that measured")
    parser.add_argument("--by-syntax", action="store_true", help="compile only what differs in more than names")
    parser.add_argument("--cache", type=Path, help="a JSON file of what was compiled before, read and written")
    parser.add_argument("--write", action="store_true", help="carry over the digests of those that are the same")
    arguments = parser.parse_args()
    failed = 0
    for database in sorted((ROOT / "tuning_db").glob("*/records.sqlite3")):
        verdicts = compare(database.parent.name, arguments)
        for row, verdict in verdicts:
            if verdict != "current":
                print(f"{verdict:9} {row['workload']}", flush=True)
        words = [verdict.split(":")[0] for _, verdict in verdicts]
        counted = ", ".join(f"{words.count(word)} {word}" for word in ("current", "same", "different"))
        print(f"{database.parent.name}: {len(words)} records: {counted}")
        failed += words.count("different")
        if arguments.write:
            carry_over(database, [row for row, verdict in verdicts if verdict == "same"])
    return 1 if failed else 0


def compare(device: str, arguments: argparse.Namespace) -> list[tuple[Row, str]]:
    """For each record of this checkout's database of a device: `current`, `same`, or `different` and why."""
    old, cache = arguments.old.resolve(), arguments.cache
    rows = _in_checkout(sys.executable, ROOT, "rows", device)
    before = {_key(row): row for row in _in_checkout(sys.executable, old, "rows", device)}
    changed = [row for row in rows if row["digest"] != row["text"]]
    both = [(before[_key(row)], row) for row in changed]
    for earlier, row in both:
        if earlier["digest"] != earlier["text"]:
            raise SystemExit(f"the record of {row['workload']} is not current in {old}: nothing can be carried over")
    apart = [(earlier, row) for earlier, row in both if earlier["tree"] != row["tree"]]
    print(f"{device}: of {len(rows)} texts {len(both)} differ, {len(apart)} of them in more than names", flush=True)
    pairs = apart if arguments.by_syntax else both
    compiled: dict[str, dict[str, str]] = json.loads(cache.read_text()) if cache and cache.is_file() else {}
    for first in range(0, len(pairs), BATCH):
        for checkout, found in zip((old, ROOT), zip(*pairs[first : first + BATCH], strict=True), strict=True):
            missing = list({_source(row): row for row in found if _source(row) not in compiled}.values())
            compiled |= _in_checkout(arguments.python, checkout, "compile", missing)
        if cache:
            cache.write_text(json.dumps(compiled))
    verdicts = {_key(row): _verdict(compiled[_source(earlier)], compiled[_source(row)]) for earlier, row in pairs}
    unchanged = {_key(row): "current" for row in rows} | {_key(row): "same" for row in changed}
    return [(row, (unchanged | verdicts)[_key(row)]) for row in rows]


def carry_over(database: Path, rows: list[Row]) -> None:
    """Write the digests of this checkout's texts into these records, and the CSV anew; their history stays."""
    sys.path.insert(0, str(ROOT))
    from flashgen.db.exchange import export_records
    from flashgen.db.past import whole
    from flashgen.db.store import Store

    texts = {_key(row): row["text"] for row in rows}
    with Store.open(database, shipped=True) as store:
        known = whole(store.reader)
    found = [
        replace(record, source_digest=texts.get((record.workload.key, record.device.identity), record.source_digest))
        for record in known.records
    ]
    count = export_records(found, database, origins=known.origins, replaced=known.replaced)
    print(f"{count} records written to {database}, {len(texts)} of them with a new digest")


def _key(row: Row) -> tuple[str, str]:
    return row["workload"], row["device"]


def _source(row: Row) -> str:
    """What is compiled."""
    return f"{row['text']} {row['specialization']} {row['triton']}"


def _verdict(old: dict[str, str], new: dict[str, str]) -> str:
    differing = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return f"different: {', '.join(differing)}" if differing else "same"


def _in_checkout(python: str, checkout: Path, task: str, given: object) -> Any:
    """What a task of this file answers in another process, which imports the flashgen of `checkout`."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        # compile for real: neither a cache of an earlier run nor this run's leftovers
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": scratch}
        environment |= {"FLASHGEN_CACHE_DIR": scratch, "FLASHGEN_ROOT_OF_TASK": str(checkout)}
        command = [python, __file__, "--task", task, str(answer)]
        subprocess.run(command, input=json.dumps(given), text=True, env=environment, cwd=checkout, check=True)
        return json.loads(answer.read_text())


# --- tasks, in a process that imports the flashgen of one checkout ------------------------------------------------


def rows(device: str) -> list[Row]:
    """Every record of a device's shipped database, with the digest of the text that this checkout renders for it."""
    from flashgen.db.store import Store

    path = Path.cwd() / "tuning_db" / device / "records.sqlite3"
    older = path.parent.with_suffix(".sqlite3")  # a checkout from before each device had a folder
    with Store.open(path if path.is_file() else older, shipped=True) as store:
        return [_row(record) for record in store.all_records()]


def _row(record: Any) -> Row:
    from flashgen.codegen.render import render
    from flashgen.core.workload import Specialization

    spec = Specialization.of(record.workload, bias_grad=True)
    source = render(spec, record.config)
    return {
        "workload": record.workload.key,
        "device": record.device.identity,
        "name": record.device.name,
        "specialization": spec.key,
        "family": record.config.family,
        "knobs": dict(record.config.knobs),
        "digest": record.source_digest,
        "text": source.digest,
        "tree": _tree(source.text),
        "triton": record.versions.triton,
    }


def _tree(text: str) -> str:
    """A digest of what a text says: its syntax without docstrings, and with numbers for the names that it gives itself.

    Parameters of kernels keep theirs, which a launch may bind by name.
    """
    module = ast.parse(text)
    kernels = [node for node in module.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    kept = {argument.arg for kernel in kernels for argument in kernel.args.args} | {kernel.name for kernel in kernels}
    given = [node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    given += [node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    given += [node.arg for node in ast.walk(module) if isinstance(node, ast.arg)]
    numbers = {name: f"name {number}" for number, name in enumerate(dict.fromkeys(given)) if name not in kept}
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.FunctionDef)):
            node.body = [each for each in node.body if not _is_docstring(each)]
        for place in ("id", "arg", "name"):  # of variables, of parameters and keywords, of functions
            name = getattr(node, place, None)
            if isinstance(name, str) and not isinstance(node, (ast.alias, ast.keyword)):
                setattr(node, place, numbers.get(name, name))
    return hashlib.sha256(ast.dump(module).encode()).hexdigest()[:16]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def compile_all(found: list[Row]) -> dict[str, dict[str, str]]:
    """For each kernel source: digests of the machine code of its kernels, and of what a launch gives them."""
    import triton

    others = {row["triton"] for row in found} - {triton.__version__}
    if others:
        raise SystemExit(
            f"records are compared under the Triton that measured them, {others}, got {triton.__version__}"
        )
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        return dict(zip(map(_source, found), pool.map(fingerprint, found), strict=True))


def fingerprint(row: Row) -> dict[str, str]:
    """Of each kernel of a config: its launch, and each section of its machine code, as digests."""
    from flashgen.codegen.build import compile_kernel
    from flashgen.core.config import Config
    from flashgen.core.device import find_device
    from flashgen.core.workload import Specialization

    spec = Specialization.parse(row["specialization"])
    compiled = compile_kernel(spec, Config.of(row["family"], row["knobs"]), find_device(row["name"]))
    if compiled.source.digest != row["text"]:
        raise SystemExit(f"{row['specialization']} renders another text in this interpreter")
    found = {}
    for number, part in enumerate(compiled.parts):
        metadata = part.handle.metadata
        types = [(parameter.type, parameter.aligned16) for parameter in part.kernel.parameters]
        launch = (types, part.num_warps, part.shared_bytes, part.registers, part.spills)
        scratch = (metadata.global_scratch_size, getattr(metadata, "profile_scratch_size", 0))
        found[f"launch of kernel {number}"] = repr((launch, scratch))
        for name, content in _sections(part.handle.asm["cubin"]):
            plain = name.replace(part.kernel.entry, f"kernel {number}")
            found[plain if str(number) in plain else f"{plain} of kernel {number}"] = content
    return found


def _sections(cubin: bytes) -> Iterator[tuple[str, str]]:
    """Names of the sections that make the machine code, each with its flags, its length and a digest of its bytes."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + size * index) for index in range(count)]
    table = headers[names][4]
    for name_at, kind, flags, _, start, length, *_ in headers:
        begin = table + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if not name.startswith(CODE_SECTIONS) or name.startswith(LEFT_OUT):
            continue
        empty = kind == 8  # SHT_NOBITS: shared memory has a size alone
        content = b"" if empty else cubin[start : start + length]
        yield name, f"{flags} {length} {hashlib.sha256(content).hexdigest()[:16]}"


TASKS = {"rows": rows, "compile": compile_all}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        Path(sys.argv[3]).write_text(json.dumps(TASKS[sys.argv[2]](json.load(sys.stdin))))
    else:
        sys.exit(main())
