"""The package as a whole: what it exports, what importing it loads and costs, its metadata, and what tests share."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashgen
from flashgen.core import errors
from tests.heavy import HEAVY

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = {
    "append_kv",
    "attention",
    "attention_decode",
    "attention_varlen",
    "block_mask",
    "BlockMask",
    "Prefix",
    "explain",
    "integrate",
    "merge_states",
    "record",
    "reload",
    "tune",
    "warmup",
    "Config",
    "Device",
    "Workload",
    "FlashgenError",
    "WorkloadError",
    "DeviceError",
    "ConfigError",
    "UnsupportedError",
    "BuildError",
    "LaunchError",
    "DatabaseError",
    "MeasureError",
    "TuningError",
    "SettingError",
    "__version__",
}

ONLY_ASKED_FOR = ("flashgen.flash_attn", "flashgen.integrations", "flashgen.reference")
"""Modules that nothing imports but the user's program."""

IMPORT_LIMIT_MS = 50

USUAL_LOOP_MS = 12.0
"""200000 steps of a loop, where the import takes 36 ms: a machine that is slower just now has so much more time.

Both are time of the processor: what it does for other processes meanwhile is not counted.
"""

IMPORT_PROBE = """
import json, sys, time
import torch

def loop_ms():
    started, total = time.process_time(), 0
    for number in range(200_000):
        total += number * number
    return (time.process_time() - started) * 1e3

before = set(sys.modules)
loops = [loop_ms()]
started = time.process_time()
import flashgen
import_ms = (time.process_time() - started) * 1e3
loaded = sorted(set(sys.modules) - before)
loops.append(loop_ms())  # beside the import: a processor that is shared may be slower a moment later
print(json.dumps({"import_ms": import_ms, "loop_ms": sum(loops) / 2, "loaded": loaded}))
"""

LOOK_UP_PROBE = """
import json, sys
import flashgen
from flashgen.core.device import find_device
from flashgen.runtime.lookup import ladder as dispatch
from flashgen.runtime.ops import serve
workload = flashgen.Workload.parse("b1-h32-hk8-s1024-d128-causal")
served = dispatch.resolve(workload, workload.specialization, find_device("h200"), serve.records())
print(json.dumps({"rung": served.rung, "loaded": sorted(sys.modules)}))
"""

WITHOUT_TORCH_PROBE = """
import json, sys
sys.modules["torch"] = None  # importing it is an error from here on
from flashgen.codegen.render import render
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
spec = Workload.parse("b1-h32-s1024-d128").specialization
print(json.dumps({"text": render(spec, default_config(spec, find_device("h100"))).text}))
"""


def probe(code: str) -> dict[str, object]:
    """The JSON that `code` prints last, run in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_public_surface_is_exactly_what_is_declared() -> None:
    assert set(flashgen.__all__) == PUBLIC
    assert all(hasattr(flashgen, name) for name in PUBLIC)


def test_every_error_is_exported_and_below_the_one_base() -> None:
    own = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert own == {name for name in PUBLIC if name.endswith("Error")}
    assert all(issubclass(getattr(flashgen, name), flashgen.FlashgenError) for name in own)


def test_every_public_name_is_documented() -> None:
    for name in flashgen.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(flashgen, name)), f"{name} has no docstring"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        flashgen.no_such_name  # noqa: B018


def test_import_loads_nothing_heavy_and_is_quick() -> None:
    times = []
    for _ in range(5):  # the fastest of a few: other processes share this machine
        seen = probe(IMPORT_PROBE)
        roots = {str(name).split(".")[0] for name in seen["loaded"]}
        assert not roots & set(HEAVY)
        assert not [name for name in seen["loaded"] if name.startswith(ONLY_ASKED_FOR)]
        import_ms, loop_ms = float(str(seen["import_ms"])), float(str(seen["loop_ms"]))
        times.append(import_ms / max(loop_ms / USUAL_LOOP_MS, 1.0))
        if times[-1] < IMPORT_LIMIT_MS:
            return
    pytest.fail(f"`import flashgen` after torch must take less than {IMPORT_LIMIT_MS} ms, took {times}")


def test_a_look_up_loads_nothing_heavy() -> None:
    seen = probe(LOOK_UP_PROBE)
    assert seen["rung"] in range(3, 9)
    assert "sqlite3" in seen["loaded"]  # the databases were read
    assert not set(HEAVY) & set(seen["loaded"])


def test_kernels_are_rendered_without_torch() -> None:
    assert "@gluon.jit" in str(probe(WITHOUT_TORCH_PROBE)["text"])


def test_version_is_the_same_everywhere() -> None:
    assert flashgen.__version__ == importlib.metadata.version("flashgen")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {flashgen.__version__}" in changelog


def imported(source: Path) -> Iterator[str]:
    """The top-level names that a file imports, at any depth, `import_module("name")` included."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            yield from (
                str(argument.value).split(".")[0] for argument in node.args if isinstance(argument, ast.Constant)
            )


def name_of(called: ast.expr) -> str:
    """The last word of what is called, where that has a name; `ast.unparse` would take most of the test's time."""
    return str(getattr(called, "attr", getattr(called, "id", "")))


def test_every_package_that_is_imported_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    declared = set(re.findall(r'^    "([A-Za-z0-9-]+)', listed[1], re.MULTILINE))
    owners = importlib.metadata.packages_distributions()
    found = {name for source in (ROOT / "flashgen").rglob("*.py") for name in imported(source)}
    found -= {*sys.stdlib_module_names, "flashgen", "typing_extensions"}  # the last for type checkers, which have it
    found -= {"sglang", "vllm"}  # an engine pins its own torch: flashgen is installed beside it, and no extra brings it
    assert {"torch", "pynvml"} <= found
    needed = {owner.lower() for name in found for owner in owners.get(name, [name])}
    optional = r'^(?:bundles|diffusers|model|ray|signatures|transformers) = \["([a-z-]+)'
    extras = set(re.findall(optional, text, re.MULTILINE))
    assert len(extras) == 6
    assert needed - extras <= declared, "what is imported where it is used is an extra"
    assert not {*declared, *extras} - needed, "nothing imports these"


NAMES_A_TEST_FILE = re.compile(r"(?<!def )\btest_")


def files_of_tests(code: str) -> Iterator[str]:
    """The test files below tests that `code` imports, or that it imports something from."""
    if not NAMES_A_TEST_FILE.search(code):  # most name none, not even in prose
        return
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        yield from (name for name in names if name.startswith("tests.") and ".test_" in name)


def test_no_test_file_is_imported() -> None:
    """What test files share lies in modules that are none: to change one, or to leave it out, concerns no other."""
    sources = (path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "golden")  # of kernels alone
    found = {path.relative_to(ROOT).as_posix(): [*files_of_tests(path.read_text("utf-8"))] for path in sources}
    assert len(found) > 300
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from tests.runtime.test_decode import run", ["tests.runtime.test_decode.run"]),
        (
            "def f():\n    from tests.runtime import (\n        ladders,\n        test_decode,\n    )",
            ["tests.runtime.test_decode"],
        ),
        ("import tests.test_package as package", ["tests.test_package"]),
        ("from tests.runtime.ladders import tuned\nfrom latest.test_words import run", []),
    ],
    ids=["of a name", "of a file", "by another name", "of no test file"],
)
def test_an_import_of_a_test_file_is_found(code: str, found: list[str]) -> None:
    assert list(files_of_tests(code)) == found


def test_no_ignore_rule_hides_a_database() -> None:
    patterns = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")]
    for name in ("records.sqlite3", "records.csv", "README.md", "replays/fwd-bf16-b1-h1-hk1-sq1-sk1-d64.jsonl.gz"):
        assert not [pattern for pattern in patterns if Path(f"tuning_db/nvidia_h200/{name}").match(pattern.strip("/"))]


def test_ci_runs_the_test_command_of_the_readme_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec make test </dev/null"]
    assert "\nmake test " in (ROOT / "README.md").read_text()
