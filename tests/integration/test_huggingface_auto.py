"""memascend.auto waits for DeepSpeed and for the key; each case runs in a separate process."""

import os
import subprocess
import sys

import pytest

from tests import forked

pytestmark = pytest.mark.deepspeed


def run(code: str, *, imported: bool = False, **environment: str) -> str:
    """Return the last line of a fresh process or, if DeepSpeed is to be imported already, of a fork."""
    command, surroundings = [sys.executable, "-c", code], os.environ | {"DS_ACCELERATOR": "cpu"} | environment
    if imported:
        done = forked.run(command, env=surroundings, timeout=120)
    else:
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def test_importing_memascend_imports_neither_torch_nor_deepspeed():
    code = "import sys, memascend, memascend.auto; print({'torch', 'deepspeed'} & set(sys.modules))"
    assert run(code) == "set()"


def test_torch_loads_the_hook_unless_its_switch_is_off():
    code = "import sys, torch; print('memascend.auto' in sys.modules)"
    assert run(code) == "True"
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


def test_the_key_is_found_in_every_form_of_a_configuration():
    code = """
import base64, contextlib, importlib.util, json, tempfile, types
import memascend.auto
importlib.util.find_spec("deepspeed")  # as transformers and Accelerate look for it
import deepspeed
from memascend.integrations import deepspeed as parts

PLAIN = {"zero_optimization": {"stage": 3}}
KEY = PLAIN | {"memascend": {}}
found = []
with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    json.dump(KEY, file)
    file.flush()
    encoded = base64.urlsafe_b64encode(json.dumps(KEY).encode()).decode()
    for call in (
        lambda: deepspeed.zero.Init(config_dict_or_path=KEY),
        lambda: deepspeed.initialize(config=file.name),
        lambda: deepspeed.initialize(config_params=encoded),
        lambda: deepspeed.initialize(args=types.SimpleNamespace(deepspeed_config=file.name)),
        lambda: deepspeed.initialize(config=base64.urlsafe_b64encode((json.dumps(KEY) + 3000 * " ").encode()).decode()),
        lambda: deepspeed.initialize(config=PLAIN),
        lambda: deepspeed.initialize(config=PLAIN | {"memascend": {"enabled": False}}),  # a later one may ask
        lambda: deepspeed.initialize(config="no such file"),
    ):
        with contextlib.suppress(Exception):  # there is no model: only what happens before that counts
            call()
        found.append(parts.active() is not None)
        parts.disable()
print(found)
"""
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "[True, True, True, True, True, False, False, False]"


def test_later_different_settings_in_a_process_are_ignored_with_warning():
    code = """
import contextlib, logging
import torch, deepspeed

lines = []
logging.getLogger("memascend").addFilter(lambda record: lines.append(record.getMessage()))
for section in ({}, {}, {"pool": "monolithic"}, {"pool": "monolithic"}, {"enabled": False}):
    with contextlib.suppress(Exception):  # there is no model: only what happens before that counts
        zero = {"stage": 3, "offload_param": {"device": "cpu"}}
        deepspeed.initialize(config={"zero_optimization": zero, "memascend": section})
print([("is ignored" in line, "monolithic" in line, "False" in line) for line in lines])
"""
    assert run(code, imported=True) == "[(True, True, False), (True, False, True)]"
    assert run(code, imported=True, RANK="1") == "[]"


def test_unreadable_configurations_are_left_to_deepspeed():
    code = """
from memascend.integrations.configuration import read_configuration
print([read_configuration(text) for text in ("/no/such/fîle.json", "Mw==", "W10=", "x" * 5000, 3, None)])
"""
    assert run(code, imported=True) == str([None] * 6)


def test_mistake_in_the_key_raises_our_error():
    code = """
import torch, deepspeed
for section in ({"memascend": {"pol": 1}}, {"mem_ascend": {}}):
    try:
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={"zero_optimization": {"stage": 3}, **section})
    except ValueError as error:
        print(error, end="; ")
"""
    said = run(code, imported=True)
    assert "unknown key 'pol' in the DeepSpeed config (did you mean pool?)" in said
    assert "'mem_ascend' in the DeepSpeed configuration would be ignored (did you mean memascend?)" in said
