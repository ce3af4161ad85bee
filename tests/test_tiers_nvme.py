import errno
import fcntl
import logging
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lynx_backend.errors import ConfigError, TierError, TierFullError
from lynx_backend.keys import CacheIdentity, ObjectName, Part, chunk_keys
from lynx_backend.testing import BoundedTierConformance
from lynx_backend.testing.tiers import UNIT, anchor, content, residual
from lynx_backend.tiers import NvmeTier, Tier, TierStats, shared_folder
from lynx_backend.tiers.shared_folder import LOG_RECORDS, SharedFolder

ROOM = 100 * UNIT


class TestNvmeTier(BoundedTierConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier"

    def make_tier(self, max_bytes: int) -> NvmeTier:
        return NvmeTier(self.path, max_bytes)

    def reopen(self, tier: Tier, max_bytes: int) -> NvmeTier:
        tier.close()
        return NvmeTier(self.path, max_bytes)


class TestNvmeTierFollowedByAnother(TestNvmeTier):
    """The same, with a second tier on the folder that must count the same at the end."""

    @pytest.fixture(autouse=True)
    def follower(self, folder: None) -> Iterator[None]:
        follower = NvmeTier(self.path, 10 * ROOM)
        yield
        counted = follower.stats()
        found = NvmeTier(self.path, 10 * ROOM).stats()
        assert counted == found


def put(tier: NvmeTier, *names: ObjectName, units: int = 1) -> None:
    for name in names:
        tier.put(name, content(name, units * UNIT))


def file_of(path: Path, name: ObjectName) -> Path:
    return path / f"{name.key.prefix[0]:02x}" / str(name)


def temp_of(path: Path, name: ObjectName) -> Path:
    return file_of(path, name).with_name(f"{name}.0123456789abcdef.tmp")


def done_by_another_program(folder: Path) -> None:
    """Give a folder that was changed a new mtime even if the file system's clock is coarse."""
    later = folder.stat().st_mtime_ns + 1
    os.utime(folder, ns=(later, later))


def test_files_fill_folders_evenly_and_nothing_else_is_left(tmp_path):
    tier = NvmeTier(tmp_path, ROOM)
    identity = CacheIdentity("model", "bfloat16", "layout", "codec")
    keys = chunk_keys(identity, range(64), chunk_tokens=1)
    for key in keys:
        tier.put(key.object(Part.ANCHOR), b"x")
    files = sorted(f.relative_to(tmp_path) for f in tmp_path.rglob("*") if f.is_file())
    expected = [file_of(Path(), key.object(Part.ANCHOR)) for key in keys]
    assert files == sorted([Path("lock"), *expected])
    assert len({f.parent for f in files}) > 40  # 57 of 256 are to be expected


def test_a_folder_made_by_the_tier_is_its_owners_only(tmp_path):
    NvmeTier(tmp_path / "a" / "b", ROOM)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("max_bytes", "min_free_bytes"), [(0, 0), (-1, 0), (1, -1)])
def test_limits_out_of_range(tmp_path, max_bytes, min_free_bytes):
    with pytest.raises(ConfigError, match=r"max_bytes >= 1|min_free_bytes"):
        NvmeTier(tmp_path, max_bytes, min_free_bytes)
    with pytest.raises(ConfigError, match=r"max_object_bytes .* got 0"):
        NvmeTier(tmp_path, 1, max_object_bytes=0)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "tier").write_text("mine")
    for path in (tmp_path / "tier", tmp_path / "tier" / "below"):
        with pytest.raises(ConfigError, match=r"tier.* move .*away, or choose another"):
            NvmeTier(path, ROOM)
    assert (tmp_path / "tier").read_text() == "mine"


def test_a_folder_that_cannot_be_made():
    with pytest.raises(ConfigError, match=r"no such folder; .* or choose another folder"):
        NvmeTier("/proc/no/kv", ROOM)


def test_a_file_in_the_place_of_a_fan_out_folder(tmp_path):
    file_of(tmp_path, anchor(0)).parent.write_text("mine")
    with pytest.raises(ConfigError, match=r"move what is in its place away"):
        NvmeTier(tmp_path, ROOM)


def test_a_file_larger_than_an_object_may_be_is_removed_unread(tmp_path, caplog):
    tier = NvmeTier(tmp_path, 64 << 30)
    put(tier, anchor(0), anchor(1))
    os.truncate(file_of(tmp_path, anchor(0)), 2 << 30)
    assert tier.sizes([anchor(0), anchor(1)]) == [None, UNIT]
    with caplog.at_level(logging.WARNING):
        found = tier.get_many([anchor(0), anchor(1)])
    assert found == [None, content(anchor(1), UNIT)]
    assert f"{anchor(0)} is larger than the {1 << 30} bytes" in caplog.text
    assert not file_of(tmp_path, anchor(0)).exists()
    assert tier.stats() == TierStats(UNIT, 64 << 30, 1, 1)
    small = NvmeTier(tmp_path, 64 << 30, max_object_bytes=UNIT)
    put(small, anchor(0))
    with pytest.raises(TierFullError, match="raise max_object_bytes"):
        put(small, anchor(0), units=2)
    assert small.get(anchor(0)) == content(anchor(0), UNIT)


def test_a_fan_out_folder_of_a_time_that_does_not_fit_the_log(tmp_path):
    """And it is followed all the same, by others too."""
    seconds = 10_413_792_000  # in 2300
    tier, other = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
    put(tier, anchor(0))
    fanout = file_of(tmp_path, anchor(0)).parent
    os.utime(fanout, ns=(seconds * 10**9,) * 2)
    if fanout.stat().st_mtime != seconds:
        pytest.skip("this file system does not keep such a time")
    assert other.stats().objects == 1
    put(tier, anchor(0), residual(0))
    assert tier.get(anchor(0)) is not None
    file_of(tmp_path, anchor(0)).unlink()
    done_by_another_program(fanout)
    assert tier.stats() == other.stats() == TierStats(UNIT, ROOM, 1, 0)


class TestForeignFiles:
    def test_other_names_are_left_alone_and_not_counted(self, tmp_path):
        tier = NvmeTier(tmp_path, 2 * UNIT)
        put(tier, anchor(0))
        fanout = file_of(tmp_path, anchor(0)).parent
        wrong_part = f"{anchor(0).key}.7"
        wrong_folder = f"{anchor(1)}"
        upper_case = str(anchor(0)).upper()
        foreign = [
            tmp_path / "README",
            tmp_path / "zz" / "x",
            fanout / "notes.txt",
            fanout / "x.tmp",
            fanout / "folder" / str(anchor(0)),
            *(fanout / name for name in (wrong_part, wrong_folder, upper_case)),
        ]
        for file in foreign:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(bytes(10 * UNIT))
        assert (
            tier.stats() == NvmeTier(tmp_path, 2 * UNIT).stats() == TierStats(UNIT, 2 * UNIT, 1, 1)
        )
        for i in range(5):
            put(tier, anchor(i))
        tier.delete(list(tier.names()))
        assert all(file.stat().st_size == 10 * UNIT for file in foreign)

    @pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "folder", "pipe"])
    def test_what_is_not_a_file_is_no_object(self, tmp_path, kind):
        tier = NvmeTier(tmp_path / "tier", 2 * UNIT)
        place = file_of(tmp_path / "tier", anchor(0))
        place.parent.mkdir()
        (tmp_path / "target").write_bytes(content(anchor(0), UNIT))
        if kind == "folder":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(tmp_path / ("target" if kind == "symlink" else "nothing"))
        before = place.lstat()
        assert tier.get(anchor(0)) is None
        assert tier.sizes([anchor(0)]) == [None]
        assert tier.stats().objects == 0
        with pytest.raises(TierError, match=rf"{place}: not a regular file; .*move it away"):
            put(tier, anchor(0))
        tier.delete([anchor(0)])
        put(tier, anchor(1), anchor(2), anchor(3))
        assert place.lstat().st_ino == before.st_ino
        assert (tmp_path / "target").read_bytes() == content(anchor(0), UNIT)

    def test_what_other_programs_remove_and_add_is_noticed(self, tmp_path):
        tier = NvmeTier(tmp_path, ROOM)
        put(tier, anchor(0), anchor(1), residual(1))
        file_of(tmp_path, anchor(0)).unlink()
        done_by_another_program(file_of(tmp_path, anchor(0)).parent)
        shutil.rmtree(file_of(tmp_path, anchor(1)).parent)
        assert tier.stats() == TierStats(0, ROOM, 0, 0)
        assert tier.get(anchor(0)) is None
        file_of(tmp_path, anchor(2)).parent.mkdir()
        file_of(tmp_path, anchor(2)).write_bytes(content(anchor(2), UNIT))
        done_by_another_program(file_of(tmp_path, anchor(2)).parent)
        assert tier.get(anchor(2)) == content(anchor(2), UNIT)
        put(tier, anchor(1))
        assert tier.stats() == TierStats(2 * UNIT, ROOM, 2, 2)


class TestSharedFolder:
    """Two tiers on one folder, as in two processes."""

    def test_each_sees_what_the_other_does(self, tmp_path):
        one, two = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
        put(one, anchor(0), residual(0))
        put(two, anchor(1), units=2)
        one.delete([residual(0)])
        two.put(anchor(0), content(anchor(0), 3 * UNIT, version=1))
        assert one.get(anchor(0)) == content(anchor(0), 3 * UNIT, version=1)
        assert sorted(one.names()) == sorted(two.names()) == sorted([anchor(0), anchor(1)])
        assert one.stats() == two.stats() == TierStats(5 * UNIT, ROOM, 2, 2)

    def test_one_limit_and_one_order_of_use(self, tmp_path):
        one, two = NvmeTier(tmp_path, 4 * UNIT), NvmeTier(tmp_path, 4 * UNIT)
        put(one, anchor(0), anchor(1))
        put(two, anchor(2), anchor(3))
        two.get(anchor(0))
        put(one, anchor(4))
        assert one.sizes([anchor(0), anchor(1)]) == [UNIT, None]
        one.get(anchor(2))
        put(two, anchor(5))
        assert two.sizes([anchor(2), anchor(3)]) == [UNIT, None]
        assert one.stats() == two.stats() == TierStats(4 * UNIT, 4 * UNIT, 4, 4)

    def test_what_the_other_does_is_followed_without_listing_folders(self, tmp_path, monkeypatch):
        one, two = NvmeTier(tmp_path, 3 * UNIT), NvmeTier(tmp_path, 3 * UNIT)
        for i in range(5):
            put(one, residual(i), anchor(i))
        two.get(anchor(3))
        one.delete([anchor(4)])
        monkeypatch.delattr(os, "scandir")
        assert two.stats() == TierStats(2 * UNIT, 3 * UNIT, 2, 1)
        put(two, anchor(4), anchor(5))
        assert one.stats() == TierStats(3 * UNIT, 3 * UNIT, 3, 1)

    def test_one_falls_behind_by_more_than_the_log_holds(self, tmp_path):
        one, two = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
        put(one, anchor(0), anchor(1))
        two.stats()
        folder = SharedFolder(tmp_path)
        with folder.locked():
            for _ in range(LOG_RECORDS):
                with folder.changing(str(anchor(9))):
                    pass
        one.delete([anchor(0)])
        put(one, anchor(2), residual(2))
        assert two.stats() == one.stats() == TierStats(3 * UNIT, ROOM, 3, 1)

    def test_the_lock_file_is_removed(self, tmp_path):
        one, two = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
        put(one, anchor(0))
        two.stats()
        (tmp_path / "lock").unlink()
        put(one, anchor(1))
        one.delete([anchor(0)])
        assert two.stats() == one.stats() == TierStats(UNIT, ROOM, 1, 1)

    def test_the_lock_file_is_removed_while_somebody_waits_for_it(self, tmp_path, monkeypatch):
        """Who gets the lock of the removed file must not take it for that of the new one."""
        monkeypatch.setattr(shared_folder, "LOCK_WAIT_SECONDS", 0.5)
        tier = NvmeTier(tmp_path, ROOM)
        put(tier, anchor(0))
        lock = tmp_path / "lock"

        def times_opened() -> int:
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            return sum(os.path.exists(f) and os.path.samefile(f, lock) for f in links)

        with ThreadPoolExecutor() as pool:
            with lock.open("rb") as old:
                fcntl.flock(old, fcntl.LOCK_EX)
                waiting = pool.submit(tier.delete, [anchor(0)])
                while times_opened() < 2 and not waiting.done():
                    pass
                lock.unlink()
                new = lock.open("xb")
                fcntl.flock(new, fcntl.LOCK_EX)
            with new, pytest.raises(TierError, match="locked"):
                waiting.result()
        assert tier.get(anchor(0)) == content(anchor(0), UNIT)

    def test_another_program_changes_a_folder_between_two_changes_of_ours(self, tmp_path):
        one, two = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
        put(one, anchor(0))
        two.stats()
        file_of(tmp_path, anchor(0)).unlink()
        done_by_another_program(file_of(tmp_path, anchor(0)).parent)
        put(one, residual(0))
        assert two.stats() == one.stats() == TierStats(UNIT, ROOM, 1, 0)

    @pytest.mark.parametrize("start", [0, 16], ids=["header and log", "log"])
    def test_garbage_in_the_lock_file(self, tmp_path, start):
        one, two = NvmeTier(tmp_path, ROOM), NvmeTier(tmp_path, ROOM)
        put(one, anchor(0))
        two.stats()
        put(one, anchor(1), residual(1))
        with (tmp_path / "lock").open("r+b") as f:
            size = f.seek(0, os.SEEK_END) - f.seek(start)
            f.write(random.Random(1).randbytes(size))
        assert two.stats() == one.stats() == TierStats(3 * UNIT, ROOM, 3, 1)
        put(one, anchor(2))
        assert two.stats() == one.stats() == TierStats(4 * UNIT, ROOM, 4, 2)

    def test_a_process_that_hangs_with_the_lock_costs_others_a_bounded_wait(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(shared_folder, "LOCK_WAIT_SECONDS", 0.05)
        tier = NvmeTier(tmp_path, ROOM)
        put(tier, anchor(0))
        with (tmp_path / "lock").open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            with pytest.raises(TierError, match=rf"{tmp_path}/lock: locked .*fuser"):
                put(tier, anchor(1))
            assert tier.get(anchor(0)) == content(anchor(0), UNIT)
        put(tier, anchor(1))


class TestTemporaryFiles:
    def test_of_a_dead_writer_is_removed(self, tmp_path):
        tier = NvmeTier(tmp_path, ROOM)
        put(tier, anchor(0))
        temp_of(tmp_path, anchor(0)).write_bytes(bytes(UNIT))
        done_by_another_program(file_of(tmp_path, anchor(0)).parent)
        assert tier.stats() == TierStats(UNIT, ROOM, 1, 1)
        assert not temp_of(tmp_path, anchor(0)).exists()
        temp_of(tmp_path, anchor(0)).write_bytes(bytes(UNIT))
        NvmeTier(tmp_path, ROOM)
        assert not temp_of(tmp_path, anchor(0)).exists()

    def test_of_a_living_writer_counts_and_stays(self, tmp_path):
        tier = NvmeTier(tmp_path, 4 * UNIT)
        put(tier, *map(anchor, range(4)))
        tier.delete([anchor(0)])
        temp = temp_of(tmp_path, anchor(0))
        with temp.open("wb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.write(bytes(UNIT))
            f.flush()
            done_by_another_program(temp.parent)
            assert tier.stats().used_bytes == 4 * UNIT
            put(tier, anchor(5))
            assert tier.sizes([anchor(0), anchor(1), anchor(5)]) == [None, None, UNIT]
            assert tier.stats() == TierStats(4 * UNIT, 4 * UNIT, 3, 3)
            with pytest.raises(TierFullError, match="12288 of them evictable"):
                put(tier, anchor(6), units=4)
            assert tier.stats().objects == 3
            assert temp.exists()
        assert tier.stats() == TierStats(3 * UNIT, 4 * UNIT, 3, 3)
        assert not temp.exists()

    def test_of_a_failed_put_is_removed_and_the_old_object_stays(self, tmp_path, monkeypatch):
        tier = NvmeTier(tmp_path, ROOM)
        put(tier, anchor(0))

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(TierError, match=rf"{tmp_path}.*dmesg"):
                tier.put(anchor(0), content(anchor(0), 2 * UNIT, version=1))
        assert [f.name for f in file_of(tmp_path, anchor(0)).parent.iterdir()] == [str(anchor(0))]
        assert tier.get(anchor(0)) == content(anchor(0), UNIT)
        assert tier.stats() == TierStats(UNIT, ROOM, 1, 1)
