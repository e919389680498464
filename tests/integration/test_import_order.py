"""DeepSpeed is watched whichever is imported first: DeepSpeed imports torch, which loads our entry point."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("imports", ["import deepspeed", "import torch, deepspeed", "import deepspeed, memascend.auto"])
def test_deepspeed_is_watched_in_any_order_of_imports(imports):
    code = f"{imports}; import deepspeed; assert deepspeed.initialize.watched_by_memascend"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
