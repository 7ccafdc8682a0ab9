"""Folders of our own: what others could change is not used, whatever they put in its place, and under any umask."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.core import folders
from flashgen.core.errors import SettingError
from flashgen.core.folders import (
    ABANDONED_SECONDS,
    make_private,
    own_subfolder,
    remove_abandoned,
    why_not_private,
    write_public,
)
from flashgen.core.settings import cache_folder, settings

ME = os.geteuid()
SOMEBODY = ME + 4242


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory for everyone, as /tmp is, and no cache asked for that could be used."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(blocked / "cache"))
    settings.cache_clear()
    return place


@pytest.fixture(params=[0o022, 0], ids=["umask-022", "umask-0"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def belongs_to_another(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    real_lstat, real_stat = os.lstat, os.stat

    def changed(seen: os.stat_result, path: object) -> object:
        if str(path) not in {str(each) for each in paths}:
            return seen
        return SimpleNamespace(st_mode=seen.st_mode, st_uid=SOMEBODY, st_gid=seen.st_gid)

    monkeypatch.setattr(os, "lstat", lambda path, **rest: changed(real_lstat(path, **rest), path))
    monkeypatch.setattr(os, "stat", lambda path, **rest: changed(real_stat(path, **rest), path))


@pytest.mark.usefixtures("umask")
def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    make_private(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.parents[:2])] == [0o700] * 3
    assert why_not_private(folder) is None
    assert own_subfolder(folder, "kernels") is None
    assert (folder / "kernels").stat().st_mode & 0o777 == 0o700
    (folder / "kernels").chmod(0o755)  # as earlier versions left it
    assert own_subfolder(folder, "kernels") is None
    assert (folder / "kernels").stat().st_mode & 0o777 == 0o700


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert why_not_private(tmp_path) is None, "others may look"


@pytest.mark.parametrize("mode", [0o777, 0o772, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_private(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    assert why_not_private(folder) == f"others can write to {folder}"
    assert own_subfolder(tmp_path, "cache") == f"others can write to {folder}"


def test_a_group_of_several_can_write_and_a_group_of_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setattr(folders, "_is_own_group", lambda number: False)
    assert why_not_private(tmp_path) == f"others can write to {tmp_path}"
    monkeypatch.setattr(folders, "_is_own_group", lambda number: True)
    assert why_not_private(tmp_path) is None


@pytest.mark.parametrize(
    ("group", "own"),
    [
        (SimpleNamespace(gr_name="me", gr_mem=[]), True),
        (SimpleNamespace(gr_name="me", gr_mem=["me"]), True),
        (SimpleNamespace(gr_name="me", gr_mem=["me", "you"]), False),
        (SimpleNamespace(gr_name="users", gr_mem=[]), False),
    ],
)
def test_a_group_of_one_has_its_user_s_name(group: object, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    monkeypatch.setattr("pwd.getpwuid", lambda number: SimpleNamespace(pw_name="me"))
    folders._is_own_group.cache_clear()
    assert folders._is_own_group(7) is own
    folders._is_own_group.cache_clear()


def test_a_folder_in_one_where_others_rename_is_not_private(tmp_path: Path) -> None:
    folder = tmp_path / "open" / "cache"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    assert why_not_private(folder) == f"others can rename what lies in {folder.parent}"
    folder.parent.chmod(0o1777)
    assert why_not_private(folder) is None


def test_links_of_this_user_lead_on_and_those_of_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "cache").mkdir(parents=True)
    link.symlink_to("../" + tmp_path.name + "/real")
    assert why_not_private(link / "cache") is None
    assert why_not_private(link) is None
    assert why_not_private(link, may_be_link=False) == f"{link} is a link"
    assert own_subfolder(tmp_path, "link") == f"{link} is a link"
    real.chmod(0o777)
    assert why_not_private(link / "cache") == f"others can rename what lies in {real}"
    real.chmod(0o700)
    belongs_to_another(monkeypatch, link)
    assert why_not_private(link / "cache") == f"{link} belongs to user {SOMEBODY}"


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "links on the way" in str(why_not_private(tmp_path / "a"))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_another_on_the_way_is_not_trusted(
    tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    foreign = [folder, *folder.parents][depth]
    belongs_to_another(monkeypatch, foreign)
    assert why_not_private(folder) == f"{foreign} belongs to user {SOMEBODY}"


# --- the cache directory ------------------------------------------------------------------------------------------


def _file(path: Path) -> None:
    path.write_text("a file")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.mkdir()
    path.symlink_to(target)


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("plant", [_file, _fifo, _link, _dangling_link, _open_folder])
def test_what_is_planted_in_the_temporary_directory_is_not_used(temporary: Path, plant: Callable[[Path], None]) -> None:
    planted = temporary / f"flashgen-{ME}"
    plant(planted)
    with pytest.warns(UserWarning, match="FLASHGEN_CACHE_DIR"):
        found = settings().cache_dir
    assert found.parent == temporary
    assert found != planted
    assert found.stat().st_mode & 0o777 == 0o700
    assert not (planted.is_dir() and list(planted.iterdir()))
    assert why_not_private(found, may_be_link=False) is None


def test_a_foreign_folder_in_the_temporary_directory_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = temporary / f"flashgen-{ME}"
    planted.mkdir(mode=0o700)
    belongs_to_another(monkeypatch, planted)
    with pytest.warns(UserWarning, match="FLASHGEN_CACHE_DIR"):
        assert settings().cache_dir != planted


@pytest.mark.usefixtures("umask")
def test_the_fallback_is_the_same_for_every_process(temporary: Path) -> None:
    for _ in range(2):
        settings.cache_clear()
        with pytest.warns(UserWarning, match="FLASHGEN_CACHE_DIR"):
            assert settings().cache_dir == temporary / f"flashgen-{ME}"
    assert settings().cache_dir.stat().st_mode & 0o777 == 0o700


def test_no_place_at_all_is_an_error_that_states_the_rule(temporary: Path) -> None:
    temporary.chmod(0o777)  # without the sticky bit others rename what lies there
    with pytest.raises(SettingError, match=r"FLASHGEN_CACHE_DIR is a folder that this user can write to and nobody"):
        settings()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_cache_that_others_can_write_to_is_not_used(
    temporary: Path, tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(shared))
    with pytest.warns(UserWarning, match=rf"{shared} cannot be used \(others can write to {shared}\)"):
        assert settings().cache_dir.parent == temporary
    assert shared.stat().st_mode & 0o7777 == mode
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("plant", [_file, _fifo, _link, _dangling_link, _open_folder])
def test_a_planted_subfolder_is_not_used_and_it_is_said_once(
    own_settings: Path, tmp_path: Path, plant: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = settings().cache_dir / "databases"
    plant(planted)
    with pytest.warns(UserWarning, match=rf"{planted} cannot be used") as said:
        found = [cache_folder("databases") for _ in range(3)]
    assert len(said) == 1
    assert set(found) == {tmp_path / f"flashgen-{ME}" / "databases"}
    assert cache_folder("kernels") == settings().cache_dir / "kernels"


def test_a_fallback_for_one_process_goes_with_it(temporary: Path) -> None:
    (temporary / f"flashgen-{ME}").write_text("a file")
    code = "from flashgen.core.settings import settings; print(settings().cache_dir)"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    made = Path(done.stdout.strip())
    assert made.parent == temporary
    assert not made.exists()


def test_a_file_to_give_away_has_the_rights_of_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "given"
    path.touch(mode=0o600)
    write_public(path, b"all of it")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"all of it", 0o666 & ~umask)
    assert list(tmp_path.iterdir()) == [path]


# --- drafts -------------------------------------------------------------------------------------------------------


def test_drafts_of_this_user_go_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = ["new.tmp", "old.py", "newfolder.tmp"], ["old.tmp", "oldfolder.tmp", "link.tmp"]
    target = tmp_path / "old.py"
    for name in ["old.py", "new.tmp", "old.tmp"]:
        (tmp_path / name).write_text("half")
    for name in ["newfolder.tmp", "oldfolder.tmp"]:
        (tmp_path / name).mkdir()
    (tmp_path / "oldfolder.tmp" / "half").write_text("half")
    (tmp_path / "link.tmp").symlink_to(target)
    then = time.time() - ABANDONED_SECONDS - 60
    for name in ["old.py", *gone]:
        os.utime(tmp_path / name, (then, then), follow_symlinks=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: SOMEBODY)
        remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *gone}, "they are another's"
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    assert target.read_text() == "half"
    remove_abandoned(tmp_path / "nowhere")
