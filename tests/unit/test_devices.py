"""No store is made on a device that may have other data: checked by signatures, users, and the given name."""

import os
import shutil
import subprocess

import pytest
import torch

from memascend.storage import devices
from memascend.storage.devices import DeviceRefused, inspect, require_formattable, require_usable
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.native import _C


def image(folder, name="image", size=8 << 20):
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


@pytest.fixture
def loop(tmp_path):
    """Make a loop device on a file of zeros."""
    if os.geteuid() != 0 or not shutil.which("losetup"):
        pytest.skip("loop devices need root and losetup")
    path = image(tmp_path, "backing", 32 << 20)
    made = subprocess.run(["losetup", "--find", "--show", path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["losetup", "-d", device], check=False)


def test_empty_file_is_formattable_once_confirmed_by_its_path(tmp_path):
    path = image(tmp_path)
    assert require_formattable(path, os.path.realpath(path)).kind == "file"
    with pytest.raises(DeviceRefused, match="confirm with its path: --serial"):
        require_formattable(path, None)
    with pytest.raises(DeviceRefused, match="has the path"):
        require_formattable(path, path + "2")


@pytest.mark.parametrize("signature", devices.SIGNATURES, ids=lambda s: f"{s.name}@{s.offset}")
def test_every_known_signature_is_found(tmp_path, signature):
    path = image(tmp_path)
    with open(path, "r+b") as file:
        file.seek(signature.offset, os.SEEK_SET if signature.offset >= 0 else os.SEEK_END)
        file.write(signature.magic)
    with pytest.raises(DeviceRefused, match="holds"):
        require_formattable(path, os.path.realpath(path), discard_contents=True)


@pytest.mark.parametrize("tool", ["mkfs.ext4 -q -F", "mkswap -q", "mkfs.xfs -q", "mkfs.btrfs -q", "mkfs.vfat"])
def test_signatures_written_by_real_tools_are_refused(tmp_path, tool):
    if not shutil.which(tool.split()[0]):
        pytest.skip(f"{tool.split()[0]} is not installed")
    path = image(tmp_path, size=320 << 20)  # mkfs.xfs makes none below 300 MiB
    made = subprocess.run([*tool.split(), path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{tool} refused: {made.stderr.strip()}")
    with pytest.raises(DeviceRefused, match="holds"):
        require_formattable(path, os.path.realpath(path), discard_contents=True)


@pytest.mark.parametrize("back", [1, 4096, 1 << 19])
@pytest.mark.parametrize("end", ["head", "tail"])
def test_unknown_data_requires_discard_contents(tmp_path, end, back):
    path = image(tmp_path)
    with open(path, "r+b") as file:
        file.seek(back if end == "head" else -back, os.SEEK_SET if end == "head" else os.SEEK_END)
        file.write(b"x")
    word = os.path.realpath(path)
    with pytest.raises(DeviceRefused, match="--discard-contents"):
        require_formattable(path, word)
    assert require_formattable(path, word, discard_contents=True)


def test_existing_store_keeps_its_owner_and_is_not_reformatted(tmp_path):
    path = image(tmp_path)
    _C.storage_format([path], "someone", [], 4096, 0)
    assert inspect(path).owner == "someone"
    assert require_usable(path).owner == "someone"
    with pytest.raises(DeviceRefused, match="holds a store of 'someone'"):
        require_formattable(path, os.path.realpath(path), discard_contents=True)


def test_file_without_a_store_is_not_usable(tmp_path):
    with pytest.raises(DeviceRefused, match="holds no store"):
        require_usable(image(tmp_path))


def test_only_block_devices_and_regular_files_are_accepted(tmp_path):
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(DeviceRefused, match="neither a block device nor a regular file"):
            inspect(path)
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "nothing")


def test_the_root_file_systems_device_is_refused():
    """Nothing is written; the refusal must come first."""
    number = os.stat("/").st_dev
    node = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not os.path.exists(node):
        pytest.skip("the root file system is on no block device")
    path = "/dev/" + os.path.basename(os.path.realpath(node))
    if not os.path.exists(path) or not os.access(path, os.R_OK):
        pytest.skip(f"{path} cannot be opened here")
    with pytest.raises(DeviceRefused, match="is mounted on"):
        require_formattable(path, inspect(path).word, discard_contents=True)


def fake_device(monkeypatch, tmp_path, loop, **files):
    """Change some of the kernel's answers about the loop device."""
    real = devices._text

    def read(path):
        for name, text in files.items():
            if str(path).endswith(name):
                return text
        return real(path)

    monkeypatch.setattr(devices, "_text", read)


def test_swap_raid_and_read_only_devices_are_recognised(loop, monkeypatch, tmp_path):
    name = os.path.basename(loop)
    fake_device(monkeypatch, tmp_path, loop, swaps=f"Filename Type Size\n{loop} partition 1 0 -2\n")
    assert any("swap" in problem for problem in inspect(loop).problems)
    fake_device(monkeypatch, tmp_path, loop, mdstat=f"md0 : active raid1 {name}[0]\n")
    assert any("RAID" in problem for problem in inspect(loop).problems)
    fake_device(monkeypatch, tmp_path, loop, **{f"{name}/ro": "1"})
    assert any("read-only" in problem for problem in inspect(loop).problems)


def test_a_swap_file_is_refused(tmp_path, monkeypatch):
    path = image(tmp_path)
    monkeypatch.setattr(devices, "_swaps", lambda: [os.path.realpath(path)])
    with pytest.raises(DeviceRefused, match="in use as swap"):
        require_formattable(path, os.path.realpath(path))


def test_loop_device_is_accepted_but_its_backing_file_is_refused(loop, tmp_path):
    assert require_formattable(loop, loop).kind == "loop"
    with pytest.raises(DeviceRefused, match="is the file behind"):
        require_formattable(tmp_path / "backing", str(tmp_path / "backing"))


def test_a_mounted_loop_device_is_refused(loop, tmp_path):
    if not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", "-F", loop], check=True)
    with pytest.raises(DeviceRefused, match=r"ext"):
        require_formattable(loop, loop)
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", loop, str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(DeviceRefused, match="is mounted on"):
            require_formattable(loop, loop)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_device_claimed_by_the_kernel_is_refused(loop):
    claimed = os.open(loop, os.O_RDONLY | os.O_EXCL)
    try:
        with pytest.raises(DeviceRefused, match="in use by the kernel"):
            require_formattable(loop, loop)
        with pytest.raises(RuntimeError, match="in use by another process or by the kernel"):
            _C.storage_format([loop], "tests", [], 4096, 0)
    finally:
        os.close(claimed)


def test_two_engines_share_a_loop_device_and_others_are_excluded(loop, tmp_path):
    require_formattable(loop, loop)
    _C.storage_format([loop], "tests", [], 4096, 0)
    config = DirectEngineConfig(control_folder=str(tmp_path))
    with DirectEngine([loop], "tests", config) as one, DirectEngine([loop], "tests", config) as two:
        one.write("w", torch.arange(100_001))
        one.wait()
        one.commit()
        assert torch.equal(two.read_new("w"), torch.arange(100_001))
        with pytest.raises(OSError, match="busy"):
            os.close(os.open(loop, os.O_RDONLY | os.O_EXCL))
        elsewhere = tmp_path / "another container"
        elsewhere.mkdir()
        with pytest.raises(RuntimeError, match="in use outside"):
            DirectEngine([loop], "tests", DirectEngineConfig(control_folder=str(elsewhere)))
    with DirectEngine([loop], "tests", config) as engine:
        assert engine.verify() == {}


def test_loop_device_supports_direct_io_despite_its_devtmpfs_node(loop):
    direct, alignment = _C.direct_limits(loop)  # /dev is a devtmpfs
    assert direct
    assert alignment in (512, 4096)
