"""The NVMe tier on real file systems, with processes that are really killed."""

import fcntl
import hashlib
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lynx_backend.errors import ConfigError, TierError, TierFullError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.testing import BoundedTierConformance
from lynx_backend.testing.tiers import UNIT, anchor, chunk, content, residual
from lynx_backend.tiers import NvmeTier, Tier, TierStats
from lynx_backend.tiers.object_file import ObjectFiles

NOBODY, SOMEBODY = 65534, 12345
LOCK_BYTES = 512 * 1024  # at least what the lock file takes


class Child:
    """A forked process that runs a function; what it writes to its pipe can be read here."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.output, pipe = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                function(pipe)
                os._exit(0)
            except BaseException:
                os._exit(1)
        os.close(pipe)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL
        os.close(self.output)

    def running(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        assert os.waitstatus_to_exitcode(status) == 0
        return pid == 0


def run_as(uid: int, function: Callable[[], Any]) -> Any:
    """What ``function`` returns, or raises, in a process of another user."""

    def work(pipe: int) -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            result = (True, function())
        except Exception as e:
            result = (False, e)
        os.write(pipe, pickle.dumps(result))

    child = Child(work)
    with open(child.output, "rb") as f:
        ok, result = pickle.loads(f.read())
    os.waitpid(child.pid, 0)
    if not ok:
        raise result
    return result


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that, unlike pytest's, other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="lynx-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def tmpfs(path: Path, size: int, *options: str) -> Any:
    return mounted(path, "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "none")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def put(tier: NvmeTier, *names: ObjectName, units: int = 1) -> None:
    for name in names:
        tier.put(name, content(name, units * UNIT))


def versioned(name: ObjectName, version: int, size: int) -> bytes:
    """Bytes that say themselves which version they are, so that any reader can check them."""
    head = version.to_bytes(8, "little")
    return head + hashlib.shake_128(f"{name}".encode() + head).digest(size - len(head))


def is_whole(name: ObjectName, data: memoryview) -> bool:
    return data == versioned(name, int.from_bytes(data[:8], "little"), data.nbytes)


def files_below(path: Path) -> dict[str, int]:
    """Sizes by name of all files in fan-out folders."""
    found = {}
    for folder in os.scandir(path):
        if folder.is_dir():
            for file in os.scandir(folder):
                found[file.name] = file.stat().st_size
    return found


def write_forever(path: Path, max_bytes: int, seed: int, pipe: int) -> None:
    rng = random.Random(seed)
    tier = NvmeTier(path, max_bytes)
    for version in range(seed << 32, (seed + 1) << 32):
        name = chunk(rng.randrange(8)).object(rng.choice(list(Part)))
        if rng.random() < 0.1:
            tier.delete([name])
        tier.put(name, versioned(name, version, rng.randrange(8, 40 * UNIT)))
        if version == seed << 32:
            os.write(pipe, b"!")


@pytest.mark.parametrize("kills", [45, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_instant(tmp_path, kills):
    max_bytes = 200 * UNIT
    rng = random.Random(5)
    survivor = NvmeTier(tmp_path, max_bytes)
    halves_left = objects_checked = 0
    for seed in range(kills):
        child = Child(lambda pipe, seed=seed: write_forever(tmp_path, max_bytes, seed, pipe))
        assert os.read(child.output, 1) == b"!"
        time.sleep(rng.uniform(0, 0.02))  # the random instant
        child.kill()

        left = files_below(tmp_path)
        assert sum(left.values()) <= max_bytes
        halves_left += sum(name.endswith(".tmp") for name in left)

        # Whoever comes first, a process that went on or one that starts, tidies up.
        recovered = NvmeTier(tmp_path, max_bytes)
        first, second = [survivor, recovered] if seed % 2 else [recovered, survivor]
        stats = first.stats()
        assert stats == second.stats()
        found = files_below(tmp_path)
        assert found == {n: size for n, size in left.items() if not n.endswith(".tmp")}
        assert (stats.objects, stats.used_bytes) == (len(found), sum(found.values()))
        for name in second.names():
            data = second.get(name)
            assert is_whole(name, data)
            objects_checked += 1
    assert halves_left > 0  # else no kill hit a put
    assert objects_checked > kills


def test_two_processes_write_the_same_keys_in_little_room(tmp_path):
    max_bytes = 30 * UNIT  # of up to 80 that they would use, 16 of them for what is being written
    names = [chunk(i).object(part) for i in range(5) for part in Part]

    def write(seed: int) -> None:
        rng = random.Random(seed)
        tier = NvmeTier(tmp_path, max_bytes)
        for version in range(seed << 32, (seed << 32) + 150):
            name = rng.choice(names)
            tier.put(name, versioned(name, version, rng.randrange(8, 8 * UNIT)))

    reader = NvmeTier(tmp_path, max_bytes)
    children = [Child(lambda pipe, seed=seed: write(seed)) for seed in (1, 2)]
    observations = reads = 0
    while children:
        children = [child for child in children if child.running()]
        with (tmp_path / "lock").open() as lock:
            # While one folder is being read, files in the next must not come and go.
            fcntl.flock(lock, fcntl.LOCK_SH)
            assert sum(files_below(tmp_path).values()) <= max_bytes
        observations += 1
        for name in names:
            data = reader.get(name)
            if data is not None:
                assert is_whole(name, data)
                reads += 1
    assert observations > 20
    assert reads > 20
    found = files_below(tmp_path)
    assert reader.stats().used_bytes == sum(found.values())
    assert not any(name.endswith(".tmp") for name in found)


def test_restart_with_less_room_after_a_crash(tmp_path):
    def write(pipe: int) -> None:
        tier = NvmeTier(tmp_path, 100 * UNIT)
        for i in range(6):
            put(tier, residual(i), anchor(i))
        tier.get(anchor(0))
        tier.get(residual(0))
        os.write(pipe, b"!")
        signal.pause()

    child = Child(write)
    assert os.read(child.output, 1) == b"!"
    child.kill()
    tier = NvmeTier(tmp_path, 4 * UNIT)
    assert tier.stats() == TierStats(4 * UNIT, 4 * UNIT, 4, 0)
    assert sum(files_below(tmp_path).values()) == 4 * UNIT
    assert sorted(tier.names()) == sorted([anchor(0), residual(0), anchor(5), residual(5)])


class TestFullDisk:
    def test_own_objects_make_room_and_those_of_others_do_not(self, tmp_path):
        path = tmp_path / "disk"
        with tmpfs(path, LOCK_BYTES + 64 * UNIT):
            tier = NvmeTier(path, 1 << 30)
            put(tier, anchor(0), anchor(1), units=8)
            disk = os.statvfs(path)
            others = path / "others"
            others.write_bytes(bytes(disk.f_bavail * disk.f_frsize))
            put(tier, anchor(2), units=8)  # in the place of anchor 0
            assert tier.sizes([anchor(0), anchor(1)]) == [None, 8 * UNIT]
            with pytest.raises(TierFullError, match=rf"{path}.*free space") as caught:
                put(tier, anchor(3), units=20)
            assert "0 bytes of the file system are free" in str(caught.value)
            assert sorted(tier.names()) == sorted([anchor(1), anchor(2)])
            assert tier.get(anchor(2)) == content(anchor(2), 8 * UNIT)
            assert not any(name.endswith(".tmp") for name in files_below(path))
            others.unlink()
            put(tier, anchor(3), units=20)
            assert tier.stats().objects == 3

    def test_min_free_bytes_stay_free(self, tmp_path):
        path = tmp_path / "disk"
        with tmpfs(path, LOCK_BYTES + 64 * UNIT):
            tier = NvmeTier(path, 1 << 30, min_free_bytes=16 * UNIT)
            for i in range(64):
                put(tier, anchor(i), units=3)
                disk = os.statvfs(path)
                assert disk.f_bavail * disk.f_frsize >= 16 * UNIT
            assert tier.get(anchor(63)) is not None
            assert tier.stats().objects > 8

    def test_out_of_inodes(self, tmp_path):
        path = tmp_path / "disk"
        names = [ChunkKey(bytes(16), bytes([7] + [i] * 15)).object(Part.ANCHOR) for i in range(20)]
        with tmpfs(path, 1 << 24, "nr_inodes=12"):
            tier = NvmeTier(path, 1 << 30)
            put(tier, *names)
            assert tier.get(names[-1]) == content(names[-1], UNIT)
            assert 2 < tier.stats().objects < 12
            tier.delete(list(tier.names()))
            for i in range(os.statvfs(path).f_ffree):
                (path / f"others{i}").touch()
            with pytest.raises(TierFullError, match=rf"{path}.*inodes"):
                put(tier, names[0])
            (path / "others0").unlink()
            put(tier, names[0])

    def test_at_start(self, tmp_path):
        path = tmp_path / "disk"
        with (
            tmpfs(path, 64 * UNIT),
            pytest.raises(ConfigError, match=rf"{path}.*free space"),
        ):
            NvmeTier(path, 1 << 30)

    def test_a_limit_on_file_sizes(self, tmp_path):
        """Stands for any failure in the middle of a put."""

        def work() -> tuple[str, dict[str, int]]:
            tier = NvmeTier(tmp_path, 1 << 30)
            put(tier, anchor(0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            with pytest.raises(TierError, match=str(tmp_path)) as caught:
                tier.put(anchor(0), bytes(2 << 20))
            assert tier.get(anchor(0)) == content(anchor(0), UNIT)
            return str(caught.value), files_below(tmp_path)

        text, files = run_as(os.geteuid(), work)
        assert "File too large" in text
        assert files == {str(anchor(0)): UNIT}


class TestFolderOutOfReach:
    def test_vanished_and_made_again(self, tmp_path):
        path = tmp_path / "tier"
        tier = NvmeTier(path, 100 * UNIT)
        put(tier, anchor(0))
        shutil.rmtree(path)
        for call in (
            lambda: put(tier, anchor(1)),
            lambda: tier.get(anchor(0)),
            lambda: tier.sizes([anchor(0)]),
            lambda: tier.delete([anchor(0)]),
            lambda: tier.stats(),
        ):
            with pytest.raises(TierError, match=rf"{path}: .*mount it, make it"):
                call()
        path.mkdir()
        assert tier.get(anchor(0)) is None
        put(tier, anchor(1))
        assert tier.stats() == TierStats(UNIT, 100 * UNIT, 1, 1)

    def test_unmounted_and_mounted_again(self, tmp_path):
        """Nothing is written below the mount point meanwhile."""
        disk, path = tmp_path / "disk", tmp_path / "tier"
        with tmpfs(disk, 1 << 24):
            with mounted(path, "--bind", str(disk)):
                tier = NvmeTier(path, 100 * UNIT)
                put(tier, anchor(0))
            for call in (lambda: put(tier, anchor(1)), lambda: tier.get(anchor(0))):
                with pytest.raises(TierError, match=rf"{path}: .*mount the former again"):
                    call()
            assert list(path.iterdir()) == []
            with mounted(path, "--bind", str(disk)):
                assert tier.get(anchor(0)) == content(anchor(0), UNIT)
                put(tier, anchor(1))
                assert tier.stats().objects == 2

    def test_read_only(self, tmp_path):
        path = tmp_path / "disk"
        with tmpfs(path, 1 << 24):
            tier = NvmeTier(path, 100 * UNIT)
            put(tier, anchor(0))
            subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
            for call in (lambda: put(tier, anchor(1)), lambda: tier.delete([anchor(0)])):
                with pytest.raises(TierError, match=rf"{path}.*read-only"):
                    call()
            assert tier.get(anchor(0)) == content(anchor(0), UNIT)
            assert tier.sizes([anchor(0)]) == [UNIT]
            with pytest.raises(ConfigError, match=rf"{path}.*read-only"):
                NvmeTier(path, 100 * UNIT)
            subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)
            put(tier, anchor(1))
            assert tier.stats().objects == 2

    @needs_root
    def test_not_permitted_at_start(self, public_path):
        theirs = public_path / "theirs"
        theirs.mkdir(mode=0o700)
        for path in (theirs, public_path / "new"):
            with pytest.raises(ConfigError, match=rf"{path}.*uid {NOBODY}"):
                run_as(NOBODY, lambda path=path: str(NvmeTier(path, UNIT)))

    @needs_root
    @pytest.mark.parametrize("mode", [0o000, 0o500], ids=["unreadable", "unwritable"])
    def test_permission_lost_and_given_back(self, public_path, mode):
        path = public_path / "tier"

        def work() -> list[str]:
            tier = NvmeTier(path, 100 * UNIT)
            put(tier, anchor(0))
            fanout = path / f"{anchor(0).key.prefix[0]:02x}"
            fanout.chmod(mode)
            with pytest.raises(TierError) as put_failed:
                tier.put(anchor(0), content(anchor(0), UNIT, version=1))
            texts = [str(put_failed.value)]
            if mode == 0o000:
                with pytest.raises(TierError) as get_failed:
                    tier.get(anchor(0))
                texts.append(str(get_failed.value))
            else:
                assert tier.get(anchor(0)) == content(anchor(0), UNIT)
            fanout.chmod(0o700)
            assert tier.get(anchor(0)) == content(anchor(0), UNIT)
            put(tier, anchor(0), anchor(1))
            assert tier.stats().objects == 2
            return texts

        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
        for text in run_as(NOBODY, work):
            assert str(path) in text
            assert f"give uid {NOBODY}" in text


@needs_root
class TestFilesOfAnotherUser:
    @pytest.fixture
    def path(self, public_path: Path) -> Path:
        """Holds residual 0, which SOMEBODY owns and NOBODY may neither read nor remove."""
        path = public_path / "tier"
        put(NvmeTier(path, 100 * UNIT), residual(0))
        fanout = path / f"{residual(0).key.prefix[0]:02x}"
        os.chown(fanout / str(residual(0)), SOMEBODY, SOMEBODY)
        (fanout / str(residual(0))).chmod(0o600)
        fanout.chmod(0o1777)
        for entry in (path, path / "lock"):
            os.chown(entry, NOBODY, NOBODY)
        return path

    def test_get_says_so(self, path):
        with pytest.raises(TierError, match=rf"{path}.*{residual(0)}.*uid {NOBODY}"):
            run_as(NOBODY, lambda: NvmeTier(path, 100 * UNIT).get(residual(0)))

    def test_what_cannot_be_removed_counts_and_does_not_stop_eviction(self, path):
        def work() -> None:
            tier = NvmeTier(path, 4 * UNIT)
            put(tier, *map(anchor, range(6)))
            assert tier.sizes([residual(0), *map(anchor, range(6))]) == [
                *[UNIT, UNIT, None, None],
                *[None, UNIT, UNIT],
            ]
            assert tier.stats().used_bytes == 4 * UNIT
            with pytest.raises(
                TierFullError, match=rf"Some objects cannot be removed: {path}.*uid {NOBODY}"
            ):
                put(tier, anchor(9), units=4)
            assert list(tier.names()) == [residual(0)]
            with pytest.raises(TierError, match=f"give uid {NOBODY}"):
                tier.delete([residual(0)])
            put(tier, anchor(7))

        run_as(NOBODY, work)
        assert str(residual(0)) in files_below(path)

    def test_a_limit_they_already_exceed(self, path):
        def work() -> None:
            tier = NvmeTier(path, UNIT // 2)
            with pytest.raises(TierFullError, match="Some objects cannot be removed"):
                tier.put(anchor(0), b"x")

        run_as(NOBODY, work)

    def test_a_temporary_file_of_theirs_counts(self, path):
        temp = path / f"{residual(0).key.prefix[0]:02x}" / f"{anchor(0)}.0123456789abcdef.tmp"
        temp.write_bytes(bytes(UNIT))
        temp.chmod(0o600)
        assert run_as(NOBODY, lambda: NvmeTier(path, 100 * UNIT).stats()) == TierStats(
            2 * UNIT, 100 * UNIT, 1, 0
        )
        assert NvmeTier(path, 100 * UNIT).stats() == TierStats(UNIT, 100 * UNIT, 1, 0)
        assert not temp.exists()


class TestConformancePastThePageCache(BoundedTierConformance):
    """The suite's objects are smaller than those that are read and written so by default."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier"

    def make_tier(self, max_bytes: int) -> NvmeTier:
        tier = NvmeTier(self.path, max_bytes)
        if not tier.direct:
            pytest.skip(f"the file system of {self.path} does not take O_DIRECT")
        tier._files = ObjectFiles(str(self.path / "lock"), direct_from=1)
        return tier

    def reopen(self, tier: Tier, max_bytes: int) -> NvmeTier:
        tier.close()
        return self.make_tier(max_bytes)


class TestConformanceOnTmpfs(BoundedTierConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> Iterator[None]:
        self.path = tmp_path / "disk"
        with tmpfs(self.path, 1 << 25):
            yield

    def make_tier(self, max_bytes: int) -> NvmeTier:
        return NvmeTier(self.path / "tier", max_bytes)

    def reopen(self, tier: Tier, max_bytes: int) -> NvmeTier:
        tier.close()
        return NvmeTier(self.path / "tier", max_bytes)


def test_out_of_file_descriptors(tmp_path):
    def work() -> None:
        tier = NvmeTier(tmp_path, 100 * UNIT)
        put(tier, anchor(0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for call in (lambda: put(tier, anchor(1)), lambda: tier.get(anchor(0))):
            with pytest.raises(TierError, match="ulimit -n"):
                call()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        put(tier, anchor(1))
        assert tier.stats().objects == 2

    run_as(os.geteuid(), work)
