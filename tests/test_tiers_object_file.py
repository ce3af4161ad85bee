"""Files past the page cache: the same bytes, whatever their size and whatever the file system."""

from __future__ import annotations

import logging
import os
import random
import subprocess
from pathlib import Path

import pytest

from lynx_backend.tiers.object_file import ObjectFiles

SIZES = [1, 4095, 4096, 4097, 8192, (8 << 20) - 1, 8 << 20, (8 << 20) + 4096, (17 << 20) + 5]


def files_in(folder: Path, **options: object) -> ObjectFiles:
    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    return ObjectFiles(str(probe), direct_from=4096, **options)


def write(files: ObjectFiles, path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, len(data))
        files.write(fd, memoryview(data))
    finally:
        os.close(fd)


def check_all_sizes(files: ObjectFiles, folder: Path) -> None:
    rng = random.Random(3)
    for size in SIZES:
        data = rng.randbytes(size)
        path = folder / str(size)
        write(files, path, b"x" + data[:-1])
        path.unlink()
        write(files, path, data)
        assert path.read_bytes() == data
        got = files.read(str(path), 1 << 30)
        assert got == data
        assert got.readonly
        path.unlink()


@pytest.mark.parametrize("direct", [True, False])
def test_any_size_comes_back(tmp_path: Path, direct: bool):
    files = files_in(tmp_path, direct=direct)
    check_all_sizes(files, tmp_path)
    assert files.direct <= direct


def test_a_direct_write_leaves_nothing_in_the_page_cache(tmp_path: Path):
    files = files_in(tmp_path)
    if not files.direct:
        pytest.skip("this file system does not take O_DIRECT")
    size = 8 << 20
    for direct, cached in ((True, False), (False, True)):
        files.direct = direct
        path = tmp_path / str(direct)
        write(files, path, bytes(size))
        assert files.read(str(path), 1 << 30) == bytes(size)
        done = subprocess.run(
            ["fincore", "--bytes", "--noheadings", "--output", "res", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert (int(done.stdout) == size) is cached


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_where_it_does_not_work_it_says_so_and_does_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    done = subprocess.run(["mount", "-t", "ramfs", "none", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr!r}")
    try:
        with caplog.at_level(logging.WARNING):
            files = files_in(tmp_path)
        assert not files.direct
        assert f"{tmp_path}: this file system does not take O_DIRECT" in caplog.text
        check_all_sizes(files, tmp_path)
        files.direct = True  # as when it stops working later
        check_all_sizes(files, tmp_path)
        assert not files.direct
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        files_in(tmp_path).read(str(tmp_path / "none"), 1)
