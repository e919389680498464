"""The contents of a wheel and a source distribution; building and trying one as a stranger is slow (make release)."""

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch  # noqa: F401  (first: the extension needs its libraries)
import yaml

from memascend import _C
from workflows.release import contents, tools

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.2.3"
INFO = f"memascend-{VERSION}.dist-info/METADATA"
SOURCES = {
    "LICENSE": "",
    "README.md": "",
    "pyproject.toml": "",
    "setup.py": "",
    "memascend/__init__.py": "",
    "memascend/py.typed": "",
    "memascend/csrc/core/a.cpp": "",
    "memascend/planner/models/m.json": "{}",
    "baselines/one/system.yaml": "",
}
IN_PACKAGE = {
    "memascend/__init__.py",
    "memascend/py.typed",
    "memascend/planner/models/m.json",
    "memascend/baselines/one/system.yaml",
}
EXTENSION = {"memascend/_C.cpython-311-x86_64-linux-gnu.so": "... memascend extension built against torch 2.13.0\0"}
METADATA = {INFO: f"Metadata-Version: 2.4\nName: memascend\nVersion: {VERSION}\nRequires-Dist: torch==2.13.*\n"}


@pytest.fixture
def source(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    (tmp_path / "source/memascend/baselines").symlink_to("../baselines")
    return tmp_path / "source"


def wrong(source: Path, files: dict[str, str], platform: str = "manylinux_2_35_x86_64") -> list[str]:
    wheel = source.parent / f"memascend-{VERSION}-cp311-cp311-{platform}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return contents.wrong_in_wheel(wheel, source, VERSION)


WHOLE = dict.fromkeys(IN_PACKAGE, "") | EXTENSION | METADATA


def test_package_includes_files_behind_a_link(source):
    assert contents.of_package(source) == IN_PACKAGE


def test_complete_wheel_passes(source):
    assert wrong(source, WHOLE) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"baselines/one.py": ""}, "it installs baselines beside memascend"),
        ({"memascend/csrc/core/a.cpp": ""}, "memascend/csrc/core/a.cpp is C++, which is in the source distribution"),
        ({"memascend/_C.other.so": ""}, "it has 2 extensions, and must have one"),
        ({INFO: "Requires-Dist: torch\n"}, "its extension was built against torch 2.13, and it asks for torch"),
        ({INFO: "Requires-Dist: torchvision\n"}, "its extension was built against torch 2.13, and it asks for no "),
    ],
)
def test_faults_of_a_wheel_are_named(source, changed, said):
    (line,) = wrong(source, WHOLE | changed)
    assert line.startswith(said)


@pytest.mark.parametrize("name", sorted(IN_PACKAGE))
def test_file_missing_from_a_wheel_is_named(source, name):
    assert wrong(source, {each: text for each, text in WHOLE.items() if each != name}) == [f"{name} is missing"]


def test_wheel_with_the_wrong_version_or_platform_is_refused(source):
    assert wrong(source, EXTENSION) == [f"it is not of version {VERSION}"]
    assert wrong(source, WHOLE, "linux_x86_64") == ["its platform is linux_x86_64, which an index refuses"]


def test_faults_of_a_source_distribution_are_named(source):
    sdist = source.parent / "s.tar.gz"
    names = (IN_PACKAGE | SOURCES.keys()) - {"memascend/csrc/core/a.cpp", "baselines/one/system.yaml"}
    with tarfile.open(sdist, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(f"memascend-{VERSION}/{name}")
            file.addfile(member, io.BytesIO())
        link = tarfile.TarInfo(f"memascend-{VERSION}/memascend/linked")
        link.type, link.linkname = tarfile.SYMTYPE, "../baselines"
        file.addfile(link)
        file.addfile(tarfile.TarInfo("elsewhere"), io.BytesIO())
    assert contents.wrong_in_sdist(sdist, source, VERSION) == [
        "memascend/csrc/core/a.cpp is missing",
        f"elsewhere lies outside of memascend-{VERSION}/",
        f"memascend-{VERSION}/memascend/linked is a link",
    ]


def test_extension_is_not_compiled_for_one_processor():
    """The instruction set is chosen at run time: a wheel that was built for one processor would crash on another."""
    assert "-march" not in (ROOT / "setup.py").read_text()


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_functions_without_avx_in_their_names_do_not_use_it():
    assert contents.bound_to_a_processor(Path(_C.__file__)) == []


@pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("cc") is None, reason="needs objdump and cc")
def test_avx_in_a_function_not_named_for_it_is_found(tmp_path):
    (tmp_path / "a.c").write_text(
        "void scale(float *x) { for (int i = 0; i < 64; ++i) x[i] *= 2; }\n"
        "void scale_avx2(float *x) { for (int i = 0; i < 64; ++i) x[i] *= 3; }\n"
        '__attribute__((target("no-avx"))) void plain(float *x) { for (int i = 0; i < 64; ++i) x[i] *= 4; }\n'
    )
    library = tmp_path / "a.so"
    subprocess.run(["cc", "-O3", "-mavx2", "-shared", "-fPIC", "-o", library, tmp_path / "a.c"], check=True)
    assert contents.bound_to_a_processor(library) == ["scale"]


def test_hosted_ci_uploads_the_output_of_make_release():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert "make release" in [step.get("run") for step in job["steps"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert job["steps"][-1]["with"]["path"] == "dist/"


def test_clean_environment_has_no_checkout_on_its_path(monkeypatch, tmp_path):
    """With a checkout on the path, pip finds memascend there and installs nothing."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MEMASCEND_SYSTEMS", str(ROOT))
    found = tools.clean(tmp_path)
    assert not {name for name in found if name.startswith(("PYTHONPATH", "MEMASCEND"))}
    assert found["PATH"].startswith(f"{tmp_path}:")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_release_is_built_and_works_in_an_empty_environment(tmp_path):
    command = [sys.executable, "-m", "workflows.release.make", "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    memascend train, three steps on the streaming engine" in done.stdout
    assert {path.suffix for path in (tmp_path / "dist").iterdir()} == {".gz", ".whl"}


def test_release_refuses_a_nonempty_output_folder(tmp_path):
    (tmp_path / "old.whl").touch()
    command = [sys.executable, "-m", "workflows.release.make", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} is not empty: remove what is in it, or name another folder with --out\n"
