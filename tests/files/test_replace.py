"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.files.replace import replace_text


def test_a_file_takes_the_place_of_another_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace_text(path, "one")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0o600)
    replace_text(path, "zwei ×")
    assert path.read_text(encoding="utf-8") == "zwei ×"
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_link_still_leads_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_what_is_no_ordinary_file_is_written_to(tmp_path: Path) -> None:
    replace_text(os.devnull, "new")
    assert not Path(os.devnull).is_file()
    with pytest.raises(IsADirectoryError):
        replace_text(tmp_path, "new")


def test_a_folder_that_is_missing_is_named_with_the_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"'/nowhere/plan\.json'"):
        replace_text("/nowhere/plan.json", "new")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_file_stays_where_writing_fails(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(*((os, step) if step == "fsync" else (Path, step)), fail)
    with pytest.raises(KeyboardInterrupt):
        replace_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
