"""Build the native extension `memascend._C` ahead of time. Metadata and dependencies are in pyproject.toml.

No CUDA toolkit is needed: the driver is called through `torch.cuda.cudart()`. The instruction set is the compiler's
baseline; functions that use AVX2 or AVX-512 have a target attribute and are selected at run time, so that one binary
runs on every x86-64 machine.
"""

import os
from glob import glob

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

os.environ.setdefault("MAX_JOBS", "2")

extension = CppExtension(
    name="memascend._C",
    sources=sorted(glob("memascend/csrc/*/*.cpp")),
    depends=sorted(glob("memascend/csrc/*/*.h")),
    include_dirs=[os.path.abspath("memascend/csrc")],
    # Contraction is off, so that a*b+c is rounded twice and every instruction set gives the same bits. Symbols are
    # hidden, like those of pybind11: only the module's entry point is called from outside.
    extra_compile_args=["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"],
    extra_link_args=["-fopenmp"],
)

setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
