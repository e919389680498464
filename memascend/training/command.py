"""`memascend train` and the commands that use a run: `info`, `export`, `generate` and `verify`."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from memascend.memory.budget import parse_bytes
from memascend.planner.command import count
from memascend.training import config as configs
from memascend.training import systems

_LEAST_TEMPERATURE = 1e-3


def add_train(commands: Any) -> None:
    """Register `train` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "train",
        help="fine-tune all weights of a model, with any system",
        description="Fine-tune all weights of a causal language model. Keys of the configuration and flags are the "
        "same; a flag wins. SIGTERM or Ctrl-C stops the run with a checkpoint; --resume continues it with identical "
        "results.",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check model, text, memory and disk, print what would be trained, and leave no files behind",
    )
    _add_options(parser)
    parser.set_defaults(run=_train)


def add_info(commands: Any) -> None:
    """Register `info` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "info",
        help="show the progress of a run, the contents of its folder, and the next command",
        description="Show a run's model, step, losses, checkpoints, states, and the next command. Read-only; the run "
        "may be training meanwhile.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run (--output of train)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=_info)


def add_export(commands: Any) -> None:
    """Register `export` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "export",
        help="write the weights of a stopped or finished run as a folder that from_pretrained loads",
        description="Write a run's newest weights into a new folder, with configuration and tokenizer: from its "
        "states on the SSD, tensor by tensor, or from its newest checkpoint, whichever is later. Of a run that trains, "
        "only checkpoints can be exported.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run (--output of train)")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument(
        "--shard-size",
        metavar="BYTES",
        help="maximum size of a file of weights, such as 5GB; several files get an index (default 50GB)",
    )
    parser.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="export the newest checkpoint, also while the run trains (default: the newest step, of a stopped run)",
    )
    parser.set_defaults(run=_export)


def add_generate(commands: Any) -> None:
    """Register `generate` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "generate",
        help="generate text from the newest weights of a run on the SSD, one block in memory at a time",
        description="Continue a text with the newest weights of a stopped or finished run of --system lohan whose "
        "states are on the SSD. Each token reads all weights once; no more of them are in memory than in training.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run (--output of train)")
    parser.add_argument("--prompt", required=True, type=_text, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--tokens", type=count, default=32, metavar="N", help="maximum number of new tokens (default 32)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="sampling temperature; 0: greedy (default)"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed for sampling (default 0)")
    parser.set_defaults(run=_generate)


def _temperature(text: str) -> float:
    value = float(text)
    if value and not _LEAST_TEMPERATURE <= value < math.inf:  # logits divided by smaller values overflow
        raise argparse.ArgumentTypeError(f"{text}: use 0 (greedy), or a number of at least {_LEAST_TEMPERATURE}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number from 0 to 2^63 - 1")
    return value


def _text(given: str) -> str:
    """Return `given`, for argparse. Raises ArgumentTypeError if it cannot be encoded as UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8: check the terminal's locale") from None
    return given


def add_verify(commands: Any) -> None:
    """Register `verify` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "verify",
        help="compare a few steps of a system with training in memory: bit-identical, or the first tensor that differs",
        description="Train the same few steps twice, from the same weights and batches: with the given system, and in "
        "memory. Losses, gradient norms, weights, master weights and moments are compared. Exit status: 0 if they are "
        "as equal as expected, else 1. Takes the keys and flags of train; --output keeps both runs.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--reference",
        metavar="SYSTEM",
        help="in_memory: plain PyTorch, one process (default); zero_offload: DeepSpeed, any --ranks",
    )
    _add_options(parser)
    parser.set_defaults(run=_verify)


def _add_options(parser: Any) -> None:
    """Add a flag for every key of a run's configuration, and the reasons for flags that are refused."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of the keys below")
    for name in configs.OPTIONS:
        flag, text = f"--{name.replace('_', '-')}", configs.help_of(name)
        if configs.is_flag(name):
            parser.add_argument(flag, action="store_true", default=None, help=text)
        elif configs.takes_many(name):
            parser.add_argument(flag, nargs="+", metavar=configs.metavar_of(name), help=text)
        else:
            parser.add_argument(flag, metavar=configs.metavar_of(name), help=text)
    parser.refused = {f"--{name.replace('_', '-')}": reason for name, reason in configs.OUT_OF_SCOPE.items()}


def _wanted(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keys that the configuration file and the flags set, checked."""
    values = configs.read_config(options.config) if options.config else {}
    for name in configs.OPTIONS:
        given = getattr(options, name)
        if given is not None:
            values[name] = configs.from_text(name, given) if isinstance(given, str) else given
    return values


def _train(options: argparse.Namespace) -> NoReturn:
    wanted = _wanted(options)
    resume = bool(options.resume)
    if resume and "model" not in wanted and "output" not in wanted:
        raise ValueError("--resume needs the run's folder: name it with --output")
    if resume and options.epochs is not None and options.steps is None:
        wanted["steps"] = None  # the flag wins over the steps with which the run was started
    config = configs.complete({"model": "?", "data": ["?"], **wanted} if resume else systems.with_defaults(wanted))
    from memascend.training.launch import join, launch

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if options.dry_run:
            raise ValueError("--dry-run runs in one process: start it without the launcher")
        raise SystemExit(join(config, resume=resume, wanted=wanted))
    raise SystemExit(launch(config, resume=resume, wanted=wanted, dry_run=options.dry_run))


def _info(options: argparse.Namespace) -> str:
    from memascend.training.info import as_text, info

    found = info(options.run_folder.absolute())
    return json.dumps(found, indent=1) if options.json else as_text(found)


def _export(options: argparse.Namespace) -> str:
    from memascend.training.export import SHARD_BYTES, export

    size = SHARD_BYTES if options.shard_size is None else parse_bytes(options.shard_size, "--shard-size")
    run, folder = options.run_folder.absolute(), options.folder.absolute()
    return export(run, folder, size, from_checkpoint=options.from_checkpoint)


def _generate(options: argparse.Namespace) -> str:
    from memascend.training.generate import generate

    return generate(options.run_folder.absolute(), options.prompt, options.tokens, options.temperature, options.seed)


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    wanted = _wanted(options)
    if options.steps is None:  # `steps` of a configuration file is the length of the whole training
        wanted.pop("steps", None)
    config = configs.complete(systems.with_defaults(wanted))
    from memascend.training import verify

    output = Path(config.output).absolute() if config.output else None
    found = verify.verify(config, options.reference, output)
    text = json.dumps(found, indent=1) if options.json else verify.as_text(found)
    return text, 1 if found["verdict"] == "different" else 0
