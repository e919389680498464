"""Trainings one after another in one process; prints what the process still has open after each, as JSON lines.

python two_trainings.py FOLDER AIO...: two trainings of one model with swap files in FOLDER for each AIO.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

import memascend
from memascend.integrations.deepspeed.accelerator import SWAP_BUFFERS
from memascend.integrations.deepspeed.hooks import Enabled
from memascend.storage.engine_tiers import DirectTier
from memascend.training.processes import free_port

HIDDEN, LAYERS, STEPS = 128, 3, 3


def settled_counts() -> tuple[int, int]:
    """Return the numbers of descriptors and threads; the kernel takes
    those of a ring down a little after it is closed."""
    counts, since = None, time.monotonic()
    while time.monotonic() < since + 1:
        now = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        if now != counts:
            counts, since = now, time.monotonic()
    return counts


def pinned_bytes() -> int:
    """Return the bytes that the kernel has pinned for rings of this process."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmPin:")]
    return int(line.split()[1]) * 1024


def can_register(folder: Path) -> bool:
    with DirectTier.in_file(folder, "probe") as tier:
        return tier.register(torch.zeros(1 << 20, dtype=torch.uint8))


def used(folder: Path, enabled: Enabled) -> dict[str, object]:
    descriptors, threads = settled_counts()
    maps = Path("/proc/self/maps").read_text().split()
    long_lived = [entry for entry in enabled.ledger.live() if entry.owner in SWAP_BUFFERS]
    return {
        "files": [str(path) for path in folder.rglob("*") if path.is_file()],
        "shared": sorted({part for part in maps if part.startswith("/dev/shm/memascend-")}),
        "descriptors": descriptors,
        "threads": threads,
        "registered": enabled.store.registered_bytes,
        "pinned": pinned_bytes(),
        "long_lived": sum(entry.requested_bytes for entry in long_lived),
    }


def train(folder: Path, aio: str) -> tuple[list[float], object, Enabled]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": nvme,
            "offload_optimizer": nvme,
        },
        "memascend": {"aio": aio},
    }
    enabled = memascend.enable(config, minimum_swap_bytes=4096)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)])
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randn(4, HIDDEN, dtype=torch.bfloat16)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine, enabled


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    kept = []  # the engines outlive their trainings, as they do in variables of a user
    print(json.dumps({"can_register": can_register(folder)}))
    for aio in sys.argv[2:]:
        for _ in range(2):
            losses, engine, enabled = train(folder, aio)
            kept.append(engine)
            during = used(folder, enabled)
            engine.destroy()
            memascend.disable()
            print(json.dumps({"losses": losses, "during": during, "after": used(folder, enabled)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
