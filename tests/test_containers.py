"""The container files, as far as they can be held to account where no container runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from build_engines.cli import app
from llm_runtime.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.test_imports import ROOT

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
SERVERS, BUILDERS = ("llm", "llm-cpu"), ("engine", "engine-cpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines())]


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("profiles", [[], ["cpu"], ["metrics"], ["cpu", "metrics"]], ids="-".join)
def test_compose_takes_the_file(profiles, tmp_path):
    options = [word for profile in profiles for word in ("--profile", profile)]
    (tmp_path / "empty").write_text("")
    command = ["docker-compose", "--env-file", tmp_path / "empty", "-f", ROOT / "docker-compose.yml", *options, "config"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert set(yaml.safe_load(result.stdout)["services"]) >= {"llm", "engine"}


def test_a_plain_up_starts_what_needs_a_gpu_and_nothing_else():
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"engine", "llm"}
    for name in ("engine", "llm"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_cpu_variant_needs_no_gpu():
    for name in ("engine-cpu", "llm-cpu"):
        assert SERVICES[name]["profiles"] == ["cpu"]
        assert "deploy" not in SERVICES[name]


@pytest.mark.parametrize(("server", "builder"), list(zip(SERVERS, BUILDERS, strict=True)))
def test_a_server_waits_for_its_engine_in_their_volume(server, builder):
    assert SERVICES[server]["depends_on"] == {builder: {"condition": "service_completed_successfully"}}
    assert SERVICES[server]["volumes"] == SERVICES[builder]["volumes"]
    assert SERVICES[server]["image"] == SERVICES[builder]["image"]
    volume, _, folder = SERVICES[server]["volumes"][0].partition(":")
    assert volume in COMPOSE["volumes"]
    engine = SERVICES[server]["command"][SERVICES[server]["command"].index("--engine") + 1]
    assert engine == SERVICES[builder]["command"][-1]
    assert engine.startswith(f"{folder}/")


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_what_triton_needs(name):
    service = SERVICES[name]
    assert [re.sub(r"\$\{\w+:-(\d+)\}", r"\1", port) for port in service["ports"]] == ["8000:8000", "8001:8001", "8002:8002"]
    assert service["shm_size"] == "1gb"
    assert "/v2/health/ready" in service["healthcheck"]["test"][-1]
    assert service["stop_grace_period"] == "30s"
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_run_once_with_options_that_exist(name):
    service = SERVICES[name]
    assert "restart" not in service
    assert service["healthcheck"] == {"disable": True}
    module, package, command, *options = service["command"]
    assert (module, package) == ("-m", "build_engines")
    known = {option for parameter in get_command(app).commands[command].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {option for option in options if option.startswith("--")} <= known
    assert "--if-needed" in options


def test_no_secret_is_in_a_file():
    example = dict(line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line)
    assert example["HF_TOKEN"] == ""
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert set(example) == used
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_user_and_copies_what_exists(name):
    found = instructions(name)
    users = [rest for word, rest in found if word == "USER"]
    assert users
    assert users[-1] not in ("0", "root")
    sources = [shlex.split(rest)[-2] for word, rest in found if word == "COPY"]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    (script, *_rest) = json.loads(next(rest for word, rest in found if word == "CMD"))
    assert (ROOT / script).is_file()


def test_every_image_has_a_version():
    images = [service["image"] for service in SERVICES.values() if "build" not in service and "/" in service["image"]]
    images += [rest for name in DOCKERFILES for word, rest in instructions(name) if word == "FROM"]
    assert len(images) == 4
    assert all(":" in image and "latest" not in image for image in images)
    assert all(":" in service["image"] for service in SERVICES.values())
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    assert {SERVICES[name]["image"] for name in SERVERS} == built


def test_prometheus_reads_the_servers_metrics_port():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["llm:8002"]}]
    assert SERVICES["llm-cpu"]["networks"]["default"]["aliases"] == ["llm"]


def test_the_dashboard_shows_metrics_that_exist():
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/llm.json").read_text())
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    known = {*GAUGES, *COUNTERS, *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count"))}
    known |= {
        f"nv_inference_{name}" for name in ("pending_request_count", "queue_duration_us", "request_success", "request_failure")
    }
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source["uid"]
        for target in panel["targets"]:
            assert set(re.findall(r"(?:llm|nv)_\w+", target["expr"])) <= known


def test_mounted_files_are_there():
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or Path(ROOT / source).exists()


def engine_folder(*variables: str) -> str:
    """Where `make engine` would build."""
    recipe = subprocess.run(["make", "-Bn", "engine", *variables], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.findall(r"--output (\S+)", recipe)[0]


def test_engines_that_differ_have_folders_that_differ():
    wanted = [("PRECISION=int4",), ("PRECISION=int4", "TARGET=tensorrt"), ("PRECISION=fp8",)]
    wanted += [("PRECISION=mixed", f"BLOCK_SIZE={size}", bits) for size in (64, 128) for bits in ("", "EFFECTIVE_BITS=5")]
    folders = [engine_folder(*filter(None, variables)) for variables in wanted]
    assert folders[0] == "engines/demo-int4-b128"
    assert len(set(folders)) == len(folders)
