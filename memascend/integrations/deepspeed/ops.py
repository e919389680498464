"""DeepSpeed's C++ ops: which of them it would compile on first use, and what its builder cannot read."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from torch.utils import cpp_extension

NEEDED = ("async_io", "cpu_adam")  # what training with states on an SSD loads
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def not_compiled() -> list[str]:
    """Those of NEEDED that DeepSpeed's accelerator of this process has neither from set-up nor from an earlier use.

    Ops that are installed ready made are of one accelerator (``make setup``: the CPU); for another one DeepSpeed
    compiles them on first use and keeps them in torch's folder of extensions.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    here = accelerator_name == get_accelerator()._name
    return [name for name in NEEDED if not (here and installed_ops.get(name)) and not _kept(name)]


def _kept(name: str) -> bool:
    return Path(cpp_extension._get_build_directory(name, verbose=False), f"{name}.so").is_file()


def readable_architectures(environment: MutableMapping[str, str] = os.environ) -> None:
    """Drop the letters of architectures such as 9.0a from TORCH_CUDA_ARCH_LIST.

    Images for one GPU set them; DeepSpeed's builder (0.19.8) ends with ValueError at them. Its ops use no instruction
    of the architecture-specific sets.
    """
    if ARCHITECTURES in environment:
        environment[ARCHITECTURES] = re.sub(r"(\d+\.\d+)[af]\b", r"\1", environment[ARCHITECTURES])
