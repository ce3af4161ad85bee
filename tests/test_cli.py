"""The command line, as a user runs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lynx_backend import Codec
from lynx_backend.cli import main
from lynx_backend.codec import Calibration
from lynx_backend.integrations.vllm.trace import Tracer
from lynx_backend.keys import ChunkKey, Part
from lynx_backend.layout import KVLayout
from lynx_backend.store import ChunkStore
from lynx_backend.tiers import NvmeTier

KEY = ChunkKey(b"i" * 16, b"p" * 16)
GOLDEN = Path(__file__).parent / "golden" / "linear-bfloat16.anchor"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def lynx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs ``lynx`` with arguments and LYNX_* variables; in this process, as imports take long."""

    def run(*arguments: str | Path, **environ: str) -> Done:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("LYNX_")]:
                patch.delenv(name)
            for name, value in {"COLUMNS": "100", **environ}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["lynx", *map(str, arguments)])
            with pytest.raises(SystemExit) as exit_:
                main()
        out, err = capsys.readouterr()
        return Done(int(exit_.value.code or 0), out, err)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds one chunk."""
    store = ChunkStore(Codec(), [NvmeTier(tmp_path / "kv", 1 << 20)])
    store.put(KEY, torch.ones(2, 1, 40, 1, 8, dtype=torch.bfloat16))
    store.close()
    return tmp_path / "kv"


def test_help_names_every_command(lynx):
    text = lynx("--help").stdout
    for command in ("demo", "check", "inspect", "calibrate", "trace", "bench"):
        assert command in text
        assert lynx(command, "--help").returncode == 0


def test_check_passes_and_leaves_nothing(folder: Path, tmp_path: Path, lynx):
    config = tmp_path / "lynx.yaml"
    config.write_text(f"nvme: {{path: {folder}, max_bytes: 64MiB, min_free_bytes: 0}}\n")
    done = lynx("check", "--config", config, LYNX_MEMORY_MAX_BYTES="32MiB")
    assert done.returncode == 0, done.stderr
    for text in ("Tier memory", "Tier nvme", "environment LYNX_MEMORY_MAX_BYTES", "ok: 2 tiers"):
        assert text in done.stdout
    assert len(list(NvmeTier(folder, 1 << 20).names())) == 2


def test_check_with_a_calibration_takes_its_models_shape(tmp_path: Path, lynx):
    Calibration.none(KVLayout(2, 3, 1, 2, 16, "bfloat16")).save(tmp_path / "model.npz")
    done = lynx(
        "check",
        LYNX_CODEC_PROFILE="adaptive",
        LYNX_CODEC_CALIBRATION=str(tmp_path / "model.npz"),
        LYNX_MEMORY_MAX_BYTES="8MiB",
    )
    assert done.returncode == 0, done.stderr
    assert "ok: 1 tier" in done.stdout


def test_check_fails_on_a_tier_too_small_and_says_so(folder: Path, lynx):
    done = lynx("check", LYNX_NVME_PATH=str(folder), LYNX_NVME_MAX_BYTES="1MiB")
    assert done.returncode == 1
    assert "tier nvme failed" in done.stdout
    assert "1048576" in done.stdout
    assert "Traceback" not in done.stderr


def test_check_fails_when_no_chunk_fits_the_queue_to_a_tier(folder: Path, lynx):
    done = lynx(
        "check",
        LYNX_NVME_PATH=str(folder),
        LYNX_NVME_MIN_FREE_BYTES="0",
        LYNX_MEMORY_MAX_BYTES="32MiB",
        LYNX_TIERING_WRITE_BEHIND_BYTES="1MiB",
    )
    assert done.returncode == 1
    assert "tier nvme failed" in done.stdout
    assert "tiering.write_behind_bytes=1048576" in done.stdout
    assert "tier memory failed" not in done.stdout


def test_check_fails_when_the_codec_leaves_nothing_of_the_cache(lynx):
    done = lynx(
        "check",
        LYNX_MEMORY_MAX_BYTES="32MiB",
        LYNX_CODEC_PROFILE="paper",
        LYNX_CODEC_ANCHOR_BITS="2",
        LYNX_CODEC_RESIDUAL_BITS="1",
    )
    assert done.returncode == 1
    assert "the codec failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["check"], {"LYNX_NVME_PTH": "/x"}, "LYNX_NVME_PATH"),
        (["bench", "fidelity", "--ablate", "--drafts"], {}, "choose one"),
        (["bench", "fidelity", "--device", "foo"], {}, "must be cpu or cuda, got 'foo'"),
        (["bench", "fidelity", "--device", "meta"], {}, "must be cpu or cuda, got 'meta'"),
        (["bench", "fidelity", "--device", "cuda:99"], {}, "no device cuda:99"),
        (["bench", "fidelity", "--json", "/none/x.json"], {}, "cannot write /none/x.json"),
        (["bench", "fidelity", "--drafts", "--plot", "/none/x.png"], {}, "cannot write /none/x"),
        (["bench", "fidelity", "--plot", "x.png"], {}, "not --table"),
        (["bench", "transport", "--json", "/none/x.json"], {}, "cannot write /none/x.json"),
        (["calibrate", "--model", "/none", "--out", "/proc/x/y"], {}, "cannot write /proc/x/y"),
        (["calibrate", "--model", "/none", "--out", "/proc/y"], {}, "cannot write /proc/y"),
        (["check"], {"LYNX_NVME_PATH": "/proc/lynx"}, "/proc/lynx"),
        (["check"], {"LYNX_CODEC_PROFILE": "best"}, "linear, paper"),
        (["check"], {"LYNX_LOG_LEVEL": "loud"}, "LYNX_LOG_LEVEL"),
        (["check", "--config", "/none.yaml"], {}, "/none.yaml"),
        (["inspect"], {}, "nvme.path"),
        (["demo", "--profile", "best"], {}, "linear, paper"),
        (["demo", "--model", "/none"], {}, "/none"),
    ],
)
def test_mistakes_are_one_readable_line(
    arguments: list[str], environ: dict[str, str], message: str, lynx
):
    done = lynx(*arguments, **environ)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_full_disk_behind_stdout_is_one_readable_line():
    script = "from lynx_backend.cli import main; main()"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LYNX_")}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, "inspect", str(GOLDEN)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_control_c_while_modules_are_imported_is_quiet():
    script = """
import os, signal, sys

class Impatient:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Impatient())
from lynx_backend.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_log_level_set_to_nothing_is_not_set(lynx):
    done = lynx("inspect", GOLDEN, LYNX_LOG_LEVEL="")
    assert done.returncode == 0, done.stderr


def test_inspect_lists_and_shows(folder: Path, lynx):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    listed = lynx("inspect", **environ)
    assert listed.returncode == 0
    assert str(KEY) in listed.stdout
    shown = lynx("inspect", str(KEY)[:10], **environ)
    assert shown.returncode == 0
    for text in ("(2, 1, 40, 1, 8) bfloat16", "profile='adaptive'", "whole", str(KEY)):
        assert text in shown.stdout
    assert shown.stdout.count("whole") == 2
    assert lynx("inspect", "ffff", **environ).returncode == 1


def test_inspect_finds_damage(folder: Path, lynx):
    (anchor,) = folder.rglob(str(KEY.object(Part.ANCHOR)))
    data = bytearray(anchor.read_bytes())
    data[-1] ^= 1
    anchor.write_bytes(data)
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    done = lynx("inspect", str(KEY), **environ)
    assert done.returncode == 1
    assert "CorruptObjectError" in done.stdout
    assert "whole" in done.stdout, "the residual is"


def test_inspect_shows_a_file(lynx):
    done = lynx("inspect", GOLDEN)
    assert done.returncode == 0
    assert "whole" in done.stdout


def test_inspect_takes_a_whole_key_for_what_is_stored(
    folder: Path, lynx, monkeypatch: pytest.MonkeyPatch
):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    anchor, residual = (KEY.object(part) for part in Part)
    (file,) = folder.rglob(str(anchor))
    monkeypatch.chdir(file.parent)
    assert lynx("inspect", str(anchor), "--tier", "bogus", **environ).returncode == 2
    done = lynx("inspect", str(anchor), "--remove", **environ)
    assert done.returncode == 0
    assert "removed 1 objects" in done.stdout
    assert not file.exists()
    shown = lynx("inspect", f"./{residual}")
    assert shown.returncode == 0
    assert "whole" in shown.stdout
    for option in (["--remove"], ["--verify"], ["--tier", "nvme"]):
        done = lynx("inspect", f"./{residual}", *option, **environ)
        assert done.returncode == 2
        assert "is a file" in done.stderr
    assert Path(str(residual)).exists()


def test_inspect_of_a_text_that_can_be_no_path(folder: Path, lynx):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    done = lynx("inspect", "f" * 300, **environ)
    assert done.returncode == 1
    assert "nothing is stored" in done.stdout


def test_inspect_evicts_nothing(folder: Path, lynx):
    done = lynx("inspect", LYNX_NVME_PATH=str(folder), LYNX_NVME_MAX_BYTES="1")
    assert done.returncode == 0
    assert "2 objects, 0.0 of 0 MB" in done.stdout.replace("\n", " ")
    assert len(list(NvmeTier(folder, 1 << 20).names())) == 2


def test_inspect_makes_no_folder(tmp_path: Path, lynx):
    done = lynx("inspect", LYNX_NVME_PATH=str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"{tmp_path / 'none'} does not exist" in done.stderr
    assert not (tmp_path / "none").exists()


def test_inspect_does_not_verify_what_another_version_wrote(folder: Path, lynx):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    (folder / "00").mkdir()
    (folder / "00" / f"{'0' * 64}.0").write_bytes(GOLDEN.read_bytes())
    done = lynx("inspect", "--verify", **environ)
    assert done.returncode == 1
    assert "0 damaged, 1 of something else" in done.stdout.replace("\n", " ")


def test_inspect_verifies_everything_and_removes_what_is_damaged(folder: Path, lynx):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    done = lynx("inspect", "--verify", **environ)
    assert done.returncode == 0
    assert "tier nvme: 2 objects whole, 0 damaged" in done.stdout
    (residual,) = folder.rglob(str(KEY.object(Part.RESIDUAL)))
    data = bytearray(residual.read_bytes())
    data[300] ^= 1
    residual.write_bytes(data)
    for arguments, said in ((["--verify"], "1 damaged,"), (["--verify", "--remove"], "removed")):
        done = lynx("inspect", *arguments, **environ)
        assert done.returncode == 1
        assert str(KEY.object(Part.RESIDUAL)) in done.stdout.replace("\n", "")
        assert said in done.stdout
    assert lynx("inspect", "--verify", **environ).returncode == 0
    assert list(NvmeTier(folder, 1 << 20).names()) == [KEY.object(Part.ANCHOR)]


def test_inspect_removes_a_chunk_and_nothing_else(folder: Path, lynx):
    environ = {"LYNX_NVME_PATH": str(folder), "LYNX_NVME_MIN_FREE_BYTES": "0"}
    assert lynx("inspect", "--remove", **environ).returncode == 2
    assert lynx("inspect", "ffff", "--remove", **environ).returncode == 1
    done = lynx("inspect", str(KEY), "--remove", "--tier", "redis", **environ)
    assert done.returncode == 2
    assert "no redis is configured" in done.stderr
    done = lynx("inspect", str(KEY), "--remove", "--tier", "nvme", **environ)
    assert done.returncode == 0
    assert "removed 2 objects" in done.stdout
    assert list(NvmeTier(folder, 1 << 20).names()) == []


def test_trace_shows_and_draws_a_request(tmp_path: Path, lynx):
    tracer = Tracer(str(tmp_path / "traces"))
    tracer.begin("cmpl-1/0", time.time(), prompt=530, stored=512)
    for event, count in (("anchors", 1), *[("draft", 1)] * 5, ("residual", 1), ("verify", 5)):
        tracer.note("cmpl-1/0", event, count)
    tracer.note("cmpl-1/0", "emit", 4)
    tracer.note("cmpl-1/0", "emit", 1)
    tracer.note("of another request", "emit", 1)
    tracer.end("cmpl-1/0")
    tracer.end("of another request")
    (file,) = (tmp_path / "traces").iterdir()
    picture = tmp_path / "trace.png"
    done = lynx("trace", file, "-o", picture)
    assert done.returncode == 0, done.stderr
    for text in ("530 tokens, 512", "first draft", "first verified token", "5. verified token"):
        assert text in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lynx("trace", file, "--token", "7").stdout.split()[-4:] == [
        "7.",
        "verified",
        "token",
        "-",
    ]


def test_trace_refuses_what_is_none(tmp_path: Path, lynx):
    wrong = tmp_path / "wrong.json"
    for content in (
        "{",
        "[]",
        '{"request": "a", "prompt": 1, "stored": 1, "events": [1]}',
        '{"request": "a", "prompt": Infinity, "stored": 1, "events": []}',
        "[" * 100_000,
    ):
        wrong.write_text(content)
        done = lynx("trace", wrong)
        assert done.returncode == 2
        assert "is not a trace" in done.stderr


def test_a_trace_that_cannot_be_written_harms_nobody(tmp_path: Path):
    (tmp_path / "file").write_text("")
    tracer = Tracer(str(tmp_path / "file"))
    tracer.begin("a", time.time(), prompt=1, stored=1)
    tracer.end("a")


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_that_there_is_not_is_named(lynx, option: str):
    done = lynx("proxy", "--prefill", "http://a", "--decode", "http://b", option, "70000")
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr


@pytest.mark.parametrize(
    "url",
    ["foo", "localhost:8000", "ftp://a", "http://", "http://a:x", "http://a:70000", "http:/a"],
)
@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_a_proxy_does_not_start_before_what_is_no_url(lynx, option: str, url: str):
    pytest.importorskip("aiohttp", reason="the proxy needs aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # what starts all the same ends here
        sides = {"--prefill": "http://127.0.0.1:1", "--decode": "http://127.0.0.1:1", option: url}
        arguments = [text for pair in sides.items() for text in pair]
        done = lynx("proxy", *arguments, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert f"{option} must be the URL of a server" in done.stderr
    assert repr(url) in done.stderr


def test_a_port_that_is_taken_is_named(lynx):
    pytest.importorskip("aiohttp", reason="the proxy needs aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sides = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1/base/")
        done = lynx("proxy", *sides, "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen at port {port} of 127.0.0.1" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
