"""What the kernels of shipped records spill under another Triton, and how often they touch it: CSV on standard output.

    python scripts/record_spills.py --python PYTHON_OF_THAT_TRITON [--cache FILE]

Every record of `tuning_db/` is compiled for its device by the Triton of that interpreter, which needs neither torch nor
a database; records with the same kernels once. A line for each kernel that spills: how many records have it, what it is
compiled for, bytes of local memory of a thread, and loads and stores of it by place (`machine_loops.py`).
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scripts.machine_loops import PLACES, disassembled, local_accesses

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("triton", "records", "specialization", "config", "kernel", "registers", "spills")
BATCH = 16
"""Kernels that one process compiles before what it found is kept."""

Row = dict[str, Any]


def main() -> int:
    """Compile all records, and print those that spill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the Triton to compile with")
    parser.add_argument("--cache", type=Path, help="a JSON file of what was compiled before, read and written")
    arguments = parser.parse_args()
    records = shipped()
    found: dict[str, list[Row]] = {}
    if arguments.cache and arguments.cache.is_file():
        found = json.loads(arguments.cache.read_text())
    missing = [row for key, row in records.items() if key not in found]
    for first in range(0, len(missing), BATCH):
        found |= compiled_by(arguments.python, missing[first : first + BATCH])
        if arguments.cache:
            arguments.cache.write_text(json.dumps(found))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"{place}_{kind}" for place in PLACES for kind in ("loads", "stores"))])
    for key, row in sorted(records.items()):
        for part in found[key]:
            described = {**part, "records": row["records"], "specialization": row["spec"], "config": row["config"]}
            if part["spills"]:
                writer.writerow([*(described[name] for name in COLUMNS), *part["touched"]])
    return 0


def shipped() -> dict[str, Row]:
    """The kernels of all shipped records, and how many records have each."""
    from flashgen.core.workload import Specialization
    from flashgen.db.store import Store

    found: dict[str, Row] = {}
    for path in sorted((ROOT / "tuning_db").glob("*/records.sqlite3")):
        with Store.open(path, shipped=True) as store:
            records = store.all_records()
        for record in records:
            spec, config = Specialization.of(record.workload, bias_grad=True), record.config
            row = {"spec": spec.key, "family": config.family, "knobs": dict(config.knobs), "config": str(config)}
            row |= {"device": record.device.name, "records": 0}
            found.setdefault(f"{spec.key} {config} {record.device.arch}", row)["records"] += 1
    return found


def compiled_by(python: str, rows: list[Row]) -> dict[str, list[Row]]:
    """What another interpreter makes of kernels, by their keys."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_CACHE_DIR": scratch,
            "FLASHGEN_CACHE_DIR": scratch,
        }
        command = [python, __file__, "--task", str(answer)]
        subprocess.run(command, input=json.dumps(rows), text=True, env=environment, cwd=ROOT, check=True)
        return json.loads(answer.read_text())


def compile_all(rows: list[Row]) -> dict[str, list[Row]]:
    """The kernels of each row, compiled by the Triton of this interpreter."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        return dict(pool.map(compile_one, rows))


def compile_one(row: Row) -> tuple[str, list[Row]]:
    """The key of a row, and what each of its kernels takes."""
    import triton

    from flashgen.codegen.build import compile_kernel
    from flashgen.core.config import Config
    from flashgen.core.device import find_device
    from flashgen.core.workload import Specialization

    device = find_device(row["device"])
    config = Config.of(row["family"], row["knobs"])
    compiled = compile_kernel(Specialization.parse(row["spec"]), config, device)
    found = []
    for part in compiled.parts:
        touched = local_accesses(disassembled(part.handle.asm["cubin"])) if part.spills else {}
        counted = [number for place in PLACES for number in touched.get(place, (0, 0))]
        what = {"triton": triton.__version__, "kernel": part.kernel.entry, "touched": counted}
        found.append({**what, "registers": part.registers, "spills": part.spills})
    return f"{row['spec']} {config} {device.arch}", found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        Path(sys.argv[2]).write_text(json.dumps(compile_all(json.load(sys.stdin))))
    else:
        sys.exit(main())
