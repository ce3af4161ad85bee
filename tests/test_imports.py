"""Imports go one way, and optional packages stay optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "lynx_backend"

#: What each module or package may import of lynx_backend; itself always.
FOUNDATION = {"errors", "config", "layout", "wire", "keys", "logs", "metrics"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "layout": {"errors"},
    "keys": {"errors"},
    "logs": set(),
    "states": set(),
    "metrics": {"errors"},
    "redis_client": {"errors", "config"},
    "wire": {"errors", "keys", "layout"},
    "codec": {"errors", "keys", "layout", "wire"},
    "tiers": {"errors", "config", "keys", "logs", "metrics", "redis_client"},
    "transport": {"errors", "config", "keys", "logs", "metrics", "redis_client"},
    "tier_access": FOUNDATION | {"tiers"},
    "directory": {"errors", "config", "logs", "metrics", "redis_client", "transport"},
    "kept_peer": {"errors", "logs", "tiers", "transport"},
    "peers": FOUNDATION | {"directory", "kept_peer", "tiers", "transport"},
    "store": FOUNDATION | {"codec", "tiers", "tier_access", "peers"},
    "store_transport": FOUNDATION | {"transport", "store"},
    "progressive": FOUNDATION | {"codec", "states", "tiers", "transport", "store"},
}
ALLOWED["baselines"] = set()
ALLOWED["shaped_link"] = set()
ALLOWED["side_channel"] = {"errors"}
ALLOWED["request_params"] = set()
ALLOWED["proxy"] = {"errors", "logs", "metrics", "request_params", "side_channel"}
ALLOWED["engines"] = {*ALLOWED}
ALLOWED["integrations"] = {*ALLOWED} - {"engines", "proxy"}
ALLOWED["testing"] = {"errors", "keys", "tiers", "transport"}
ALLOWED["models"] = {"errors"}
ALLOWED["texts"] = {"errors"}
ALLOWED["benchmarks"] = {*ALLOWED}
ALLOWED["cli"] = {*ALLOWED}

#: Packages that only some installations have, and the one place each may be imported in; a
#: benchmark compares with what it can be compared with.
OPTIONAL = {
    "redis": "redis_client.py",
    "ucxx": "transport/ucx.py",
    "cupy": "codec/cuda.py",
    "prometheus_client": "metrics.py",
    "zmq": "side_channel.py",
    "aiohttp": "proxy/app.py",
}


MEASURED = {
    ("lmcache", "benchmarks/peers.py"),
    ("lmcache", "benchmarks/transport_peers.py"),
    ("ucxx", "benchmarks/transport_peers.py"),
}


def modules() -> list[tuple[str, Path, ast.Module]]:
    """(part, file, syntax tree) of every file below the package, part as in ``ALLOWED``."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part != "__init__":
            found.append((part, path, ast.parse(path.read_text())))
    return found


def imported(path: Path, tree: ast.Module) -> set[str]:
    """Absolute names of all modules a file imports, anywhere in it."""
    package = ("lynx_backend", *path.relative_to(ROOT).parts[:-1])
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def test_every_part_has_a_rule():
    assert {part for part, _, _ in modules()} <= set(ALLOWED)


def test_imports_go_one_way():
    wrong = []
    for part, path, tree in modules():
        for name in imported(path, tree):
            pieces = name.split(".")
            if pieces[0] == "lynx_backend" and len(pieces) > 1:
                target = pieces[1]
                if target in ALLOWED and target != part and target not in ALLOWED[part]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
                if target not in ALLOWED and target != "__version__":
                    wrong.append(f"{path.relative_to(ROOT)} imports {name} past its package")
    assert not wrong


def test_optional_packages_are_imported_in_one_place():
    wrong = []
    for part, path, tree in modules():
        for name in imported(path, tree):
            top = name.split(".")[0]
            place = str(path.relative_to(ROOT))
            measured = (top, place) in MEASURED
            if OPTIONAL.get(top, place) != place and not measured:
                wrong.append(f"{place} imports {name}")
            if top in ("vllm", "sglang", "lmcache") and part != "integrations" and not measured:
                wrong.append(f"{place} imports {name}")
    assert not wrong


def test_the_package_imports_without_optional_packages():
    script = """
import sys
for name in ("redis", "ucxx", "cupy", "lmcache", "vllm", "sglang", "prometheus_client",
             "transformers", "matplotlib", "gguf"):
    sys.modules[name] = None
import lynx_backend, lynx_backend.store, lynx_backend.progressive, lynx_backend.cli.app
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_package_alone_does_not_load_numba():
    """vLLM on a CPU imports the package before its own kernels, and must not find numba loaded."""
    script = "import sys, lynx_backend, lynx_backend.integrations.lmcache, lynx_backend.states; "
    script += "assert not {'numba', 'llvmlite', 'lmcache'} & set(sys.modules); "
    script += "assert lynx_backend.Codec and lynx_backend.CodecSpec"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
