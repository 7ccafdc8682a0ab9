"""`make release`: checks what a release needs, builds its archives, checks them, and prints the command for the tag.

Nothing is pushed or uploaded. The bundle of compiled kernels, which takes minutes, is `make bundle`'s; whether it is
there and as new as the tree is printed. Usage: release.py [--check]; with --check nothing is built.
"""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from trove_classifiers import classifiers

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"


def main(arguments: list[str] | None = None) -> int:
    """Check, build and check again; 0 if the tag may be made."""
    options = sys.argv[1:] if arguments is None else arguments
    version = version_of(ROOT)
    wrong = [*problems_of_tree(ROOT, version), *problems_of_changelog(ROOT, version)]
    if not wrong and "--check" not in options:
        folder = ROOT / "dist"
        build(ROOT, folder)
        for path in archives(folder, version):
            wrong += [f"{path.name}: {problem}" for problem in problems_of_metadata(metadata(path), version)]
    for problem in wrong:
        print(f"error: {problem}")
    if wrong:
        return 1
    print(f"flashgen {version} is ready; make its tag with:")
    print(f"  git tag --annotate v{version} --message 'flashgen {version}'")
    print("files of the release, beside the archives:")
    for path in bundle(ROOT / "dist"):
        print(f"  {path.relative_to(ROOT)}{'' if is_newer(path, ROOT) else ' (not of this tree: make bundle)'}")
    return 0


def bundle(folder: Path) -> list[Path]:
    """The compiled kernels of the H200's records, and the records; they serve the sources of which they are made."""
    return [folder / f"nvidia_h200.{kind}" for kind in ("kernels", "sqlite3")]


def is_newer(path: Path, root: Path) -> bool:
    """Whether a file is there that was made behind the last commit."""
    return path.exists() and path.stat().st_mtime >= int(git(root, "log", "-1", "--format=%ct"))


def version_of(root: Path) -> str:
    """The version that the package says it has."""
    text = (root / "flashgen/_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError("flashgen/_version.py has a line __version__ = ..., and it has none")
    return match[1]


def problems_of_tree(root: Path, version: str) -> Iterator[str]:
    """A tree that is not what a tag would name."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"a release is made of a clean tree, got {', '.join(line[3:] for line in changed[:3])}{more}"
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    if branch != BRANCH:
        yield f"a release is made on {BRANCH}, got {branch}"
    if git(root, "tag", "--list", f"v{version}").strip():
        yield f"a version is released once, and the tag v{version} is there: raise flashgen/_version.py"


def problems_of_changelog(root: Path, version: str) -> Iterator[str]:
    """A changelog that does not have the version with its date on top, or a citation of another one."""
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    top = headings[0] if headings else "nothing"
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", top):
        yield f"CHANGELOG.md begins with `## {version} (YYYY-MM-DD)`, got `## {top}`"
    cited = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if cited is None or cited[1] != version:
        yield f"CITATION.cff has `version: {version}`, got {cited[1] if cited else 'none'}"


def problems_of_metadata(message: email.message.Message, version: str) -> Iterator[str]:
    """What a package index would refuse, or show wrongly, of the metadata of an archive."""
    if message["Version"] != version:
        yield f"its version is {version}, got {message['Version']}"
    for name in message.get_all("Classifier", []):
        if name not in classifiers:
            yield f"a classifier is one of the known ones, got {name}"
    kind = (message["Description-Content-Type"] or "").split(";")[0]
    if kind != "text/markdown":
        yield f"the long description is text/markdown, got {kind or 'nothing'}"
    text = str(message.get_payload())
    if len(text.split()) < 100:
        yield f"the long description is a text, got {len(text.split())} words"
    yield from problems_of_description(text)


def problems_of_description(text: str) -> Iterator[str]:
    """Links that lead nowhere on the page of an index, and HTML, of which an index leaves most out."""
    tokens = list(_flat(MarkdownIt("commonmark").enable("table").parse(text)))
    for token in tokens:
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if target and not re.match(r"https://|#", target):
            yield f"a link is absolute (https://...), got {target}"
        if token.type.startswith("html") and not token.content.lstrip().startswith("<!--"):
            yield f"the long description is without HTML, got {token.content.strip()[:60]}"


def _flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flat(token.children or [])


def build(root: Path, folder: Path) -> None:
    """The source archive, and the wheel that is built from it."""
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(root)]
    subprocess.run(line, check=True)


def archives(folder: Path, version: str) -> list[Path]:
    """The two files of a version."""
    return [folder / f"flashgen-{version}.tar.gz", folder / f"flashgen-{version}-py3-none-any.whl"]


def metadata(path: Path) -> email.message.Message:
    """What an archive says of itself."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return email.parser.BytesParser().parsebytes(wheel.read(name))
    with tarfile.open(path) as archive:
        (member,) = (each for each in archive.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", each.name))
        file = archive.extractfile(member)
        return email.parser.BytesParser().parsebytes(file.read() if file else b"")


def git(root: Path, *arguments: str) -> str:
    """What git answers of the tree."""
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
