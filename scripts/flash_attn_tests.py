"""FlashAttention's own tests with flashgen's modules in its place: how many pass, are refused by name, and fail.

    python -m scripts.flash_attn_tests CHECKOUT [--version 2] [--device cpu] [--sample 20] [--seed 0]
                                       [--limit-seconds 540] [--only PATTERN] [--all]

`CHECKOUT` is a clone of Dao-AILab/flash-attention, or its git directory: nothing is fetched. Of each test function
`--sample` cases are drawn by the seed, in turns, so that a time limit leaves some of each. On a CPU the references
compute, cases are small, and "cuda" in the tests becomes "cpu". Of version 3, cases with qv and fp8 are left out and no
case has an attention_chunk, unless with `--all`: all of them would be refused by name. Exit codes: 0 nothing failed, 1
something did, 2 usage.

The tests import einops. With pytest-xdist they run side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.core.quoting import printable

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "2": {"test_flash_attn_2.py": "tests/test_flash_attn.py"},
    "3": {
        "test_flash_attn_3.py": "hopper/test_flash_attn.py",
        "test_util.py": "hopper/test_util.py",
        "padding.py": "hopper/padding.py",
    },
}
"""Of each version the names of copies, the tests first, and where FlashAttention has them."""

CHUNKS = ("[torch.randint(1, seqlen_k * 2, (1,)).item(), 0]", "[0]")
"""How version 3's tests draw `attention_chunk` in every case, and how they do without."""

OUTCOMES = ("passed", "refused", "failed", "skipped", "not ended", "not started")
GRACE_S = 60.0
"""After the time limit, for the tests that have begun."""

MOST_REASONS = 12
STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of one case; `reason` is the error's type and text."""

    function: str
    case: str
    outcome: str
    reason: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is that nothing failed."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            tests = copied(options.checkout, options.version, Path(folder), options.device, with_all=options.all)
        except (OSError, ImportError) as error:
            print(printable(str(error)), file=sys.stderr)
            return 2
        log = Path(folder) / "found.jsonl"
        code = _run(tests, log, options)
        found = read(log)
    print(table(found))
    for line in reasons(found):
        print(line)
    if not found:
        print(f"no test ran: pytest ended with {code}", file=sys.stderr)
    return 0 if found and not any(one.outcome == "failed" for one in found) else 1


def copied(checkout: Path, version: str, folder: Path, device: str, *, with_all: bool = False) -> Path:
    """Copies of a version's tests; the path of the one to run.

    Raises:
        OSError: the checkout has no such file.
        ImportError: the tests import einops, and it is not there.
    """
    for name, path in FILES[version].items():
        text = source(checkout, path)
        if "einops import" in text and importlib.util.find_spec("einops") is None:
            raise ModuleNotFoundError(f"FlashAttention's {path} imports einops, which is not installed")
        text = text if with_all else text.replace(*CHUNKS)
        (folder / name).write_text(text.replace('"cuda"', '"cpu"') if device == "cpu" else text)
    return folder / next(iter(FILES[version]))


def source(checkout: Path, path: str) -> str:
    """The text of a file of a clone, or of the last commit of a git directory.

    Raises:
        OSError: there is none.
    """
    if (checkout / path).is_file():
        return (checkout / path).read_text()
    done = subprocess.run(
        ["git", "-C", str(checkout), "show", f"HEAD:{path}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FileNotFoundError(f"{checkout} is no checkout of FlashAttention: it has no {path}")
    return done.stdout


def _run(tests: Path, log: Path, options: argparse.Namespace) -> int:
    """Pytest in a process of its own, ended with its children when it does not end by itself."""
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "scripts.flash_attn_plugin"]
    words += ["-p", "no:cacheprovider", "--rootdir", str(log.parent), "-c", os.devnull, "--show-capture=no"]
    words += ["-n", str(options.jobs)] if options.jobs > 1 and importlib.util.find_spec("xdist") else []
    words += ["-k", options.only] if options.only else []
    given = {
        "log": str(log),
        "device": options.device,
        "sample": options.sample,
        "seed": options.seed,
        "all": options.all,
        "ends": time.time() + options.limit_seconds,
    }
    paths = [str(ROOT), str(log.parent), os.environ.get("PYTHONPATH", "")]
    more = {"FLASH_ATTN_TESTS": json.dumps(given), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    more |= {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
    # what tests print goes to the standard error, so that the table stands alone
    # of this process alone: what pytest-xdist tells its workers
    here = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with subprocess.Popen([*words, str(tests)], env=here | more, stdout=STDERR) as process:
        try:
            return process.wait(options.limit_seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # pytest's workers end with it
            return process.wait()


def read(log: Path) -> list[Found]:
    """What was noted last of each case, also by a run that was ended."""
    lines = log.read_text().splitlines() if log.is_file() else []
    by_case = {found.case: found for line in lines for found in [Found(**json.loads(line))]}
    return list(by_case.values())


def table(found: Sequence[Found]) -> str:
    """Counts of each function and of all."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        counts.setdefault(one.function, Counter())[one.outcome] += 1
    counts = dict(sorted(counts.items()))
    counts["all"] = Counter(one.outcome for one in found)
    head = ["test", *OUTCOMES]
    rows = [[name, *(str(count[outcome]) for outcome in OUTCOMES)] for name, count in counts.items()]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (head, *rows)]
    return "\n".join(lines)


def reasons(found: Sequence[Found]) -> list[str]:
    """Why cases were refused or failed, the most frequent first, with one case of each."""
    lines = []
    for outcome in ("refused", "failed", "not ended"):
        some = [one for one in found if one.outcome == outcome]
        counts = Counter(_rule(one) for one in some)
        for reason, count in counts.most_common(MOST_REASONS):
            case = next(one.case for one in some if _rule(one) == reason)
            lines.append(f"{outcome} {count}: {printable(reason)} ({printable(case)})".replace(":  (", ": ("))
        if len(counts) > MOST_REASONS:
            lines.append(f"{outcome}: {len(counts) - MOST_REASONS} more reasons")
    return lines


def _rule(found: Found) -> str:
    """A reason without the value that broke it."""
    return found.reason.partition(", got ")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.flash_attn_tests")
    parser.add_argument("checkout", type=Path, help="a clone of Dao-AILab/flash-attention, or its git directory")
    parser.add_argument("--version", choices=list(FILES), default="2", help="of FlashAttention (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sample", type=int, default=20, help="cases of each test function (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--all", action="store_true", help="also version 3's cases with qv, attention_chunk and fp8, which are refused"
    )
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="start no case later (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="side by side, with xdist")
    parser.add_argument("--only", help="names of tests, as pytest's -k has them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
