"""memascend.auto waits for DeepSpeed and for the key; each case in a process of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.deepspeed


def run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DS_ACCELERATOR": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def test_importing_the_library_and_its_hook_imports_neither_torch_nor_deepspeed():
    code = "import sys, memascend, memascend.auto; print({'torch', 'deepspeed'} & set(sys.modules))"
    assert run(code) == "set()"


def test_torch_loads_the_hook_and_its_own_switch_turns_that_off():
    code = "import sys, torch; print('memascend.auto' in sys.modules)"
    assert run(code) == "True"
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


CASES = """
import base64, contextlib, json, sys, tempfile, types
import importlib.util
import memascend.auto
importlib.util.find_spec("deepspeed")  # as transformers and Accelerate look for it
import deepspeed
from memascend.integrations import deepspeed as parts

KEY = {{"zero_optimization": {{"stage": 3}}, "memascend": {{}}}}
with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    json.dump(KEY, file)
    file.flush()
    config = {config}
    with contextlib.suppress(Exception):  # there is no model: only what happens before that counts
        {call}
print(parts.active() is not None)
"""


@pytest.mark.parametrize(
    ("config", "call", "enabled"),
    [
        ("KEY", "deepspeed.zero.Init(config_dict_or_path=config)", "True"),
        ("file.name", "deepspeed.initialize(model=None, config=config)", "True"),
        ("base64.urlsafe_b64encode(json.dumps(KEY).encode()).decode()", "deepspeed.initialize(config=config)", "True"),
        ("types.SimpleNamespace(deepspeed_config=file.name)", "deepspeed.initialize(args=config)", "True"),
        ("{'zero_optimization': {'stage': 3}}", "deepspeed.initialize(config=config)", "False"),
        ("'no such file'", "deepspeed.initialize(config=config)", "False"),
    ],
)
def test_the_key_is_found_in_every_form_of_a_configuration(config, call, enabled):
    assert run(CASES.format(config=config, call=call), TORCH_DEVICE_BACKEND_AUTOLOAD="0") == enabled


def test_a_mistake_in_the_key_is_one_line_of_ours():
    code = """
import torch, deepspeed
try:
    config = {"zero_optimization": {"stage": 3}, "memascend": {"pol": 1}}
    deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config)
except ValueError as error:
    print(error)
"""
    assert "unknown key 'pol' in the DeepSpeed config; known keys: pinned" in run(code)
