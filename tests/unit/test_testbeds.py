"""The machines of the papers, and the probe of this one."""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hardware import probe
from hardware.registry import FOLDER, check, known_testbeds, load_testbed
from memascend.simulator import Calibration, Task, simulate
from memascend.simulator.testbed import resources_of_testbed
from workflows import registry

ROOT = Path(__file__).parents[2]
# Testbed -> (paper's CSV, series, exhibit) whose cells it repeats.
TABLES = {
    "memascend-c1": ("Configuration 1", "memascend-tab03"),
    "memascend-c2": ("Configuration 2", "memascend-tab03"),
    "memascend-c3": ("Configuration 3", "memascend-tab05"),
}


def specification(series: str, exhibit: str) -> dict[str, str]:
    with (ROOT / "results/published/memascend.csv").open(newline="") as file:
        return {
            row["x_value"]: row["value"]
            for row in csv.DictReader(file)
            if (row["exhibit_id"], row["series"]) == (exhibit, series)
        }


@pytest.mark.parametrize("testbed_id", known_testbeds())
def test_every_testbed_fits_the_schema_and_its_file_name(testbed_id):
    assert load_testbed(testbed_id)["id"] == testbed_id


def test_every_paper_has_its_machines():
    papers = {load_testbed(testbed_id)["paper"] for testbed_id in known_testbeds()}
    assert papers - {None} == set(registry.PAPERS)


@pytest.mark.parametrize("testbed_id", TABLES)
def test_memascend_machines_agree_with_its_printed_tables(testbed_id):
    testbed, printed = load_testbed(testbed_id), specification(*TABLES[testbed_id])
    assert testbed["cpu"] in printed["CPU"]
    assert printed["CPU"].startswith("2 ×") == (testbed["sockets"] == 2)
    assert testbed["memory"] == printed["CPU Memory"]
    assert testbed["pcie"] == printed["PCIe"]
    for part, key in (("GPU", "gpus"), ("SSD", "ssds")):
        (device,) = testbed[key]
        assert printed[part].startswith(f"{device['count']} × {device['model']}")


@pytest.mark.parametrize("testbed_id", ["mlpoffload-testbed1", "mlpoffload-testbed2"])
def test_mlp_offload_bandwidths_agree_with_its_printed_table(testbed_id):
    series = {"mlpoffload-testbed1": "Testbed-1", "mlpoffload-testbed2": "Testbed-2"}[testbed_id]
    with (ROOT / "results/published/mlp_offload.csv").open(newline="") as file:
        printed = {
            row["metric"]: float(row["value"])
            for row in csv.DictReader(file)
            if (row["exhibit_id"], row["series"], row["unit"]) == ("mlpoffload-tab01", series, "GB/s")
        }
    ours = {entry["what"]: entry["gb_per_s"] for entry in load_testbed(testbed_id)["bandwidths"]}
    names = {
        "pinned D<->H bandwidth": "pinned device to host, each way",
        "NVMe read": "NVMe read",
        "NVMe write": "NVMe write",
        "PFS read": "parallel file system read",
        "PFS write": "parallel file system write",
    }
    assert {names[metric]: value for metric, value in printed.items()} == {name: ours[name] for name in names.values()}


@pytest.mark.parametrize("testbed_id", ["mlpoffload-testbed1", "mlpoffload-testbed2"])
def test_mlp_offload_paths_have_the_printed_bandwidths(testbed_id):
    testbed = load_testbed(testbed_id)
    printed = {entry["what"]: entry["gb_per_s"] for entry in testbed["bandwidths"]}
    for path, what in zip(testbed["paths"], ("NVMe", "parallel file system"), strict=True):
        assert path["read_gb_per_s"]["value"] == printed[f"{what} read"]
        assert path["write_gb_per_s"]["value"] == printed[f"{what} write"]
    assert testbed["rates"]["pcie_gb_per_s"]["value"] == printed["pinned device to host, each way"]


@pytest.mark.parametrize("testbed_id", known_testbeds())
def test_every_testbed_becomes_a_machine_of_the_simulator(testbed_id):
    testbed = load_testbed(testbed_id)
    machine = resources_of_testbed(testbed)
    gpus = sum(gpu["count"] for gpu in testbed["gpus"])
    peak = testbed["rates"]["gpu_tflops_16bit"]["value"] * 1e12
    tasks = [Task(name=f"t{i}", phase="p", rank=i, needs={f"gpu{i}": peak, f"pcie{i}.down": 1.0}) for i in range(gpus)]
    assert simulate(tasks, machine).seconds == pytest.approx(1.0)
    assert {path["name"] for path in testbed.get("paths", [])} <= set(machine.resources)
    assert {node["name"] for node in testbed.get("memory_nodes", [])} <= set(machine.resources)


def test_efficiency_applies_to_every_gpu_and_unknown_resource_is_refused():
    half = Calibration(name="efficiency of gpu", value=0.5, unit="1", reason="test", reach="test")
    machine = resources_of_testbed(load_testbed("memascend-c1"), calibrations=[half])
    assert [machine.resources[f"gpu{i}"].rate for i in range(2)] == [378e12, 378e12]
    with pytest.raises(ValueError, match="'efficiency of tpu': testbed memascend-c1 has no such resource"):
        resources_of_testbed(
            load_testbed("memascend-c1"), calibrations=[dataclasses.replace(half, name="efficiency of tpu")]
        )


def test_an_unknown_testbed_lists_the_known_ones():
    with pytest.raises(ValueError, match="memascend-c1"):
        load_testbed("memascend-c9")


@pytest.mark.parametrize(
    ("key", "value"),
    [("cores", -1), ("paper", "no name of a folder"), ("quotes", []), ("speed", 3), ("gpus", [{"model": "A100"}])],
)
def test_invalid_testbed_is_refused_with_file_and_key(key, value):
    testbed = yaml.safe_load((FOLDER / "ssdtrain.yaml").read_text())
    with pytest.raises(ValueError, match=r"ssdtrain\.yaml:") as caught:
        check({**testbed, key: value}, "ssdtrain.yaml")
    assert key in str(caught.value)


def test_hardware_imports_no_torch():
    code = "import hardware.probe, hardware.registry, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.fixture
def machine(tmp_path):
    """Make a two-socket server with a CXL node, one NVMe drive, one hard disk and a loop device."""

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    blocks = [f"processor : {i}\nmodel name : Test CPU\nphysical id : {i % 2}\ncore id : {i // 4}\n" for i in range(8)]
    write("proc/cpuinfo", "\n".join(blocks))
    write("proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\n")
    write("sys/fs/cgroup/memory.max", f"{8 * 2**30}\n")
    for node, (cpus, gib) in enumerate([("0-3", 24), ("4-7", 24), ("", 16)]):
        write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
        write(f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: {gib * 2**20} kB\n")
    for name, rotational, sectors in (("nvme0n1", 0, 1953125000), ("sda", 1, 1953125000), ("loop0", 0, 8)):
        write(f"sys/block/{name}/size", f"{sectors}\n")
        write(f"sys/block/{name}/queue/rotational", f"{rotational}\n")
    write("sys/block/nvme0n1/device/model", "Test SSD  \n")
    write("sys/class/nvme/nvme0/device/current_link_speed", "16.0 GT/s PCIe\n")
    write("etc/os-release", 'NAME="Test"\nPRETTY_NAME="Test OS 1"\n')
    return tmp_path


def test_the_probe_reads_a_server(machine, monkeypatch):
    monkeypatch.setattr(probe, "read_gpus", list)
    found = probe.probe(machine)
    assert (found["cpu"], found["sockets"], found["cores"]) == ("Test CPU", 2, 4)
    assert (found["memory_gib"], found["local"]["usable_memory_gib"]) == (64, 8)
    assert found["local"]["logical_cores"] == 8
    assert [drive["model"] for drive in found["ssds"]] == ["Test SSD"]
    assert found["ssds"][0]["capacity_tb"] == 1
    assert found["pcie"] == "Gen4"
    assert found["local"]["numa_nodes"][2] == {"node": 2, "cpus": "", "memory_gib": 16}
    assert found["software"]["os"] == "Test OS 1"


def test_probe_in_unlimited_cgroup_reports_all_memory(machine, monkeypatch):
    monkeypatch.setattr(probe, "read_gpus", list)
    (machine / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert probe.probe(machine)["local"]["usable_memory_gib"] == 64


def test_equal_gpus_are_counted_together(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA A, 24576\\nNVIDIA A, 24576\\nNVIDIA B, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert probe.read_gpus() == [
        {"model": "NVIDIA A", "count": 2, "memory_gib": 24.0},
        {"model": "NVIDIA B", "count": 1, "memory_gib": None},
    ]


def test_without_driver_no_gpu_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.read_gpus() == []


@pytest.mark.parametrize(("name", "read"), [("local.yaml", yaml.safe_load), ("deep/local.json", json.loads)])
def test_probe_writes_a_valid_description_of_this_machine(tmp_path, name, read):
    out = tmp_path / name
    assert probe.main(["--out", str(out)]) == 0
    found = read(out.read_text())
    check(found, name)
    assert found["id"] == "local"


def test_machine_without_proc_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this needs Linux"):
        probe.probe(tmp_path)


def test_unwritable_target_gives_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert probe.main(["--out", str(tmp_path / "file" / "local.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
