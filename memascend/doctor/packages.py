"""Checks of the installed packages: their versions, compared with the tested ones, and their compiled parts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from memascend.doctor.checks import FAIL, OK, WARN, Check
from memascend.extension import NotLoadable

# Oldest versions that were tested. DeepSpeed's list comes from the integration, which warns by the same list.
OLDEST_TRANSFORMERS = (4, 51)
OLDEST_PYTHON_TORCH = (2, 4)
OPS = {"async_io": "deepspeed/ops/aio/async_io_op", "cpu_adam": "deepspeed/ops/adam/cpu_adam_op"}


def version(package: str) -> str | None:
    """Return the installed version of `package`, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version, or (0, 0) if it has no such numbers."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_extension() -> Check:
    """Check whether our compiled extension can be loaded."""
    try:
        from memascend import _C
    except NotLoadable as error:
        return Check(name="extension", status=FAIL, found=error.reason, fix=error.fix)
    return Check(name="extension", status=OK, found=f"memascend._C, kernels for {_C.simd_level()}")


def check_torch(found: str | None) -> Check:
    """Check torch; `found` is its version, None if it is not installed."""
    if found is None:
        return Check(
            name="torch",
            status=FAIL,
            found="not installed",
            fix="pip install 'torch==2.13.*', or make setup in a checkout",
        )
    if numbers(found) < OLDEST_PYTHON_TORCH:
        return Check(
            name="torch", status=WARN, found=f"{found} has not been tried", fix="pip install -c constraints.txt torch"
        )
    return Check(name="torch", status=OK, found=found)


def check_deepspeed(found: str | None, tried: tuple[str, ...]) -> Check:
    """Check DeepSpeed; `found` is its version (None: not installed), `tried` are the tested ones."""
    if found is None:
        return Check(
            name="DeepSpeed",
            status=WARN,
            found="not installed: of the systems only lohan, in_memory and ssdtrain train",
            fix="pip install 'memascend[deepspeed]', or make setup in a checkout",
        )
    if found not in tried:
        return Check(
            name="DeepSpeed",
            status=WARN,
            found=f"{found} has not been tried with memascend (tried: {', '.join(tried)})",
            fix=f"pip install deepspeed=={tried[-1]}, or go on: hooks are found by name and signature",
        )
    return Check(name="DeepSpeed", status=OK, found=f"{found}, tried")


def check_ops(
    site: Path | None, kept: Sequence[str] = (), gpu: bool = False, locks: Mapping[str, Path] = MappingProxyType({})
) -> Check:
    """Check DeepSpeed's compiled ops; missing ones would compile for minutes on first use.

    `site` is the folder that holds the deepspeed package, `kept` are ops compiled by an earlier use. With `gpu`, the
    ops built at set-up do not count, since they are for the CPU. `locks` are lock files of ops that no process owns.
    """
    ready = [name for name, path in OPS.items() if site and not gpu and list(site.glob(f"{path}*.so"))]
    if stuck := [name for name in locks if name not in ready]:
        return Check(
            name="DeepSpeed ops",
            status=FAIL,
            found=f"{', '.join(stuck)} would wait for ever for a lock that a killed compile has left",
            fix=f"rm {' '.join(str(locks[name]) for name in stuck)}, unless another machine is compiling",
        )
    missing = [name for name in OPS if name not in (*ready, *kept)]
    if missing and gpu:
        return Check(
            name="DeepSpeed ops",
            status=WARN,
            found=f"{', '.join(missing)} not compiled for the GPU: the first step would compile for minutes",
            fix="in a checkout: python -m workflows.gpu --load-ops",
        )
    if missing:
        return Check(
            name="DeepSpeed ops",
            status=WARN,
            found=f"{', '.join(missing)} not compiled: the first step would compile for minutes",
            fix="make setup in a checkout, or DS_BUILD_AIO=1 DS_BUILD_CPU_ADAM=1 pip install --no-cache-dir "
            "--force-reinstall --no-deps deepspeed",
        )
    return Check(name="DeepSpeed ops", status=OK, found=f"{', '.join(OPS)} compiled")


def compiled_by_use() -> tuple[list[str], bool, dict[str, Path]]:
    """Return the ops that DeepSpeed compiled on an earlier use, whether a GPU computes, and abandoned lock files."""
    try:
        import torch

        from memascend.integrations.deepspeed import ops
    except ImportError:
        return [], False, {}
    locks = {name: lock for name in OPS if (lock := ops.abandoned_lock(name))}
    return [name for name in OPS if ops.kept(name)], torch.cuda.is_available(), locks


def check_transformers(found: str | None) -> Check:
    """Check transformers; `found` is its version, None if it is not installed."""
    if found is None:
        fix = "pip install 'memascend[huggingface]', or make setup in a checkout"
        return Check(name="transformers", status=WARN, found="not installed: memascend train needs it", fix=fix)
    if numbers(found) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        return Check(
            name="transformers",
            status=WARN,
            found=f"{found} is older than {oldest}, the oldest that was tried",
            fix=f"pip install 'transformers>={oldest}'",
        )
    return Check(name="transformers", status=OK, found=found)


def tried_deepspeed() -> tuple[str, ...]:
    """Return the DeepSpeed versions that the integration was tested with; none if it cannot be imported."""
    try:
        from memascend.integrations.deepspeed.compat import TRIED_VERSIONS
    except ImportError:
        return ()
    return tuple(TRIED_VERSIONS)


def cuda() -> tuple[bool, str]:
    """Return whether torch sees a CUDA device, and the CUDA version of torch (or torch's own version without CUDA)."""
    if importlib.util.find_spec("torch") is None:
        return False, "not installed"
    import torch

    return torch.cuda.is_available(), torch.version.cuda or torch.__version__


def check_packages() -> Iterator[Check]:
    """Yield every check of packages, in the order of the report."""
    yield check_extension()
    yield check_torch(version("torch"))
    installed = version("deepspeed")
    yield check_deepspeed(installed, tried_deepspeed() or ((installed,) if installed else ()))
    if installed is not None:
        spec = importlib.util.find_spec("deepspeed")
        yield check_ops(Path(spec.origin).parents[1] if spec and spec.origin else None, *compiled_by_use())
    yield check_transformers(version("transformers"))
