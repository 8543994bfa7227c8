"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ccq.files import write_bytes_atomically


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"", b"new"):
        write_bytes_atomically(path, data)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "error"),
    [("missing/file", FileNotFoundError), ("folder", IsADirectoryError), ("folder/file/inside", NotADirectoryError)],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, name: str, error: type[OSError]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"old")
    with pytest.raises(error) as caught:
        write_bytes_atomically(tmp_path / name, b"new")
    assert caught.value.filename == str(tmp_path / name)
    assert caught.value.filename2 is None
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["folder", "folder/file"]
