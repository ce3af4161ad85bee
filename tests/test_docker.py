"""The container files are well formed, and name what exists. No container is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lynx_backend.integrations.lmcache.settings import Settings

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_compose_mounts_and_builds_what_there_is():
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_file(), source
        if "build" in service:
            context = DOCKER / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()


def test_services_that_are_waited_for_and_volumes_exist():
    file = compose()
    for service in file["services"].values():
        assert set(service.get("depends_on", {})) <= set(file["services"])
        named = {v.split(":")[0] for v in service.get("volumes", [])}
        assert {n for n in named if re.fullmatch(r"\w+", n)} <= set(file["volumes"])


def test_json_on_command_lines():
    found = 0
    for service in compose()["services"].values():
        for word in service.get("command", []):
            if (start := word.find("{")) >= 0:
                found += len(json.loads(word[start:])) > 0
    assert found


def test_lynx_takes_its_settings():
    settings = yaml.safe_load((DOCKER / "lmcache.yaml").read_text())["extra_config"]
    config = Settings.load(settings["lynx"]).config
    assert config.nvme.path == "/mnt/lynx"
    assert config.redis.url == "redis://redis:6379"


def test_lynx_takes_the_servers_settings():
    (word,) = (w for w in compose()["services"]["lmcache"]["command"] if "l2-adapter" in w)
    adapter = json.loads(word[word.find("{") :])
    params = adapter["adapter_params"]
    assert params.pop("kv_cache") == {"head_dim": 128}
    assert Settings.load(params).config.nvme.path == "/mnt/lynx"


def test_the_dashboard_shows_metrics_that_there_are():
    prometheus = pytest.importorskip("prometheus_client")
    from lynx_backend import metrics

    assert metrics.OBJECTS
    known = {family.name for family in prometheus.REGISTRY.collect()}
    board = json.loads((DOCKER / "grafana" / "lynx.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"lynx_\w+", target["expr"])
    }
    assert len(shown) >= 7
    assert {re.sub("_(total|bucket)$", "", name) for name in shown} <= known


@pytest.mark.parametrize("profile", ["in-process", "server"])
def test_prometheus_asks_the_service_that_has_the_store(profile: str):
    services = compose()["services"]
    (store,) = (
        name
        for name, service in services.items()
        if profile in service.get("profiles", []) and "/mnt/lynx" in settings_of(service)
    )
    command = [word.partition("=") for word in services[store]["command"]]
    options = {name: value for name, _, value in command}
    port = options.get("--http-port", "8000")
    if store == "lmcache":  # which listens for others only when told to, unlike vLLM
        assert options["--http-host"] == "0.0.0.0"
    jobs = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    asked = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    assert f"{store}:{port}" in asked
    assert {target.split(":")[0] for target in asked} <= set(services)


def settings_of(service: dict[str, Any]) -> str:
    """What a service is told of Lynx: in its command, or in the file that its environment names."""
    named = service.get("environment", {}).get("LMCACHE_CONFIG_FILE")
    file = (DOCKER / Path(named).name).read_text() if named else ""
    return file + " ".join(service.get("command", []))


def test_the_dockerfile_copies_from_where_it_is_built():
    text = (DOCKER / "Dockerfile").read_text()
    assert re.findall(r"^COPY (\S+)", text, re.MULTILINE) == ["."]
    extras = re.search(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE)
    listed = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", listed, re.MULTILINE), extra
