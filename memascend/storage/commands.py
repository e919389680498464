"""`memascend storage {format,ls,verify,gc,destroy}`: shell commands to create, inspect and destroy stores."""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Callable
from typing import Any

from memascend.storage import devices as checks
from memascend.storage.freed_space import allocate_space
from memascend.storage.shared_memory import CONTROL_FOLDER

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_storage(commands: Any) -> None:
    """Register `storage` and its subcommands with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "storage",
        help="create, list, verify and destroy stores of tensors on raw devices",
        description="A store is a set of devices (or files) over which tensors are striped. Name all of its devices.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", parser_class=type(parser))
    _add(actions, "format", _format, "create an empty store; refuses devices that may hold data", _format_options)
    _add(actions, "ls", _list, "list the tensors of a store", _json_option)
    _add(actions, "verify", _verify, "read every tensor and compare its checksum; exit status 2 if any is damaged",
         _verify_options)  # fmt: skip
    _add(actions, "gc", _collect, "remove what killed processes left in shared memory; for a store also compact the "
         "log to its live records and free what dead processes had reserved; for a folder remove the scratch files "
         "that "
         "killed processes left there", several="*")  # fmt: skip
    _add(actions, "destroy", _destroy, "destroy a store and all of its tensors", _destroy_options)


def _add(
    actions: Any,
    name: str,
    run: Callable[[argparse.Namespace], str],
    summary: str,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    several: str = "+",
) -> None:
    """Add a subcommand that calls `run` and takes devices, as many as `several` (argparse's `nargs`) says."""
    parser = actions.add_parser(name, help=summary, description=summary)
    text = "block device, loop device or preallocated file"
    parser.add_argument("devices", nargs=several, metavar="DEVICE", help=text)
    parser.add_argument("--control-folder", default=CONTROL_FOLDER, help=argparse.SUPPRESS)
    if options:
        options(parser)
    parser.set_defaults(run=lambda chosen: _reported(run, chosen))


def _reported(run: Callable[[argparse.Namespace], str], options: argparse.Namespace) -> str:
    """Run a command. A RuntimeError of the store is raised as a ValueError."""
    try:
        return run(options)
    except RuntimeError as error:  # foreign, incomplete, damaged or in use
        raise ValueError(str(error)) from error


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    _json_option(parser)
    parser.add_argument("--repair", action="store_true", help="erase the damaged tensors from the index")


def _word_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", required=True, help="the run or model that the store belongs to")
    parser.add_argument(
        "--serial",
        action="append",
        default=[],
        help="serial number of each device, in the same order; for a file or loop device its full path",
    )


def _destroy_options(parser: argparse.ArgumentParser) -> None:
    _word_options(parser)


def _format_options(parser: argparse.ArgumentParser) -> None:
    _word_options(parser)
    parser.add_argument(
        "--weight",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="relative share of each device (default: equal)",
    )
    parser.add_argument("--chunk", type=_size, default=64 << 10, metavar="SIZE", help="allocation unit (default 64K)")
    parser.add_argument(
        "--log", type=_size, default=0, metavar="SIZE", help="size of half the index log (default: by device size)"
    )
    parser.add_argument(
        "--size", type=_size, metavar="SIZE", help="create missing files of this size, fully written once"
    )
    parser.add_argument(
        "--discard-contents", action="store_true", help="allow overwriting devices with unrecognised contents"
    )


def _size(text: str) -> int:
    """Return the bytes of a size such as 4096, 64K or 8G. Raises ArgumentTypeError for anything else."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4096, 64K or 8G")
    return int(number) * _UNITS[unit]


def _words(options: argparse.Namespace) -> list[str | None]:
    """Return the serial number given for each device, or None for each. Raises ValueError if some are missing."""
    if options.serial and len(options.serial) != len(options.devices):
        raise ValueError(f"{len(options.devices)} devices but {len(options.serial)} --serial: give one for each")
    return options.serial or [None] * len(options.devices)


def _require_distinct(paths: list[str]) -> None:
    """Raise ValueError for a repeated device, also under another name, since it would overwrite itself."""
    seen: dict[tuple[int, int, int], str] = {}
    for path in paths:
        if os.path.exists(path):
            status = os.stat(path)
            key = (status.st_rdev, 0, 0) if status.st_rdev else (0, status.st_dev, status.st_ino)
            if key in seen:
                raise ValueError(f"{seen[key]} and {path} are the same device: name each once")
            seen[key] = path


def _require_existing(paths: list[str], fix: str) -> None:
    """Raise ValueError, with the suggestion `fix`, if one of the paths does not exist."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"there is no {path}: {fix}")


def _format(options: argparse.Namespace) -> str:
    """Create missing files of the given size, format all devices as one store, and return the text to print."""
    from memascend.storage.native import _C

    words = _words(options)
    if options.size is None:
        _require_existing(options.devices, "name a device, or let --size make a file")
    _require_existing([os.path.dirname(path) or "." for path in options.devices], "make that folder first")
    _require_distinct(options.devices)
    if options.weight and len(options.weight) != len(options.devices):
        raise ValueError(f"{len(options.devices)} devices but {len(options.weight)} --weight: give one for each")
    for path, word in zip(options.devices, words):
        if not os.path.lexists(path) and options.size is not None:
            if word != os.path.realpath(path):
                raise checks.DeviceRefused(f"{path} would be created: confirm with --serial {os.path.realpath(path)}")
        else:
            checks.require_formattable(path, word, options.discard_contents)
    for path in options.devices:
        if not os.path.lexists(path):
            preallocate(path, options.size)
    _C.storage_format(options.devices, options.owner, options.weight, options.chunk, options.log)
    return f"store of '{options.owner}' on {', '.join(options.devices)}"


def preallocate(path: str, size_bytes: int, written: bool = True) -> None:
    """Create a file with allocated blocks; `written`: filled with zeros, so no later write has to convert an extent.

    Raises FileExistsError; on any other error, such as lack of space (ENOSPC), the file is removed again.
    """
    with open(path, "xb", buffering=0) as file:
        try:
            allocate_space(file.fileno(), size_bytes)
            zeros = memoryview(bytes(1 << 22))
            for at in range(0, size_bytes if written else 0, len(zeros)):
                left = zeros[: size_bytes - at]
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError as error:
            os.unlink(path)
            fix = "free space, or choose another folder or size" if error.errno == errno.ENOSPC else "check that disk"
            raise OSError(error.errno, f"{error.strerror} for {size_bytes:,} bytes: {fix}", path) from error


def _open(options: argparse.Namespace) -> Any:
    """Return the store on the devices, each of which is checked before. Raises DeviceRefused, and ValueError."""
    from memascend.storage.native import _C

    _require_existing(options.devices, "name the devices of a store")
    for path in options.devices:
        checks.require_usable(path)
    return _C.Store(options.devices, "", options.control_folder, 1 << 20, True)


def _list(options: argparse.Namespace) -> str:
    """Return the store's tensors and space as text, or as JSON."""
    store = _open(options)
    block, space, found = store.superblock(0), store.space(), store.list()
    if options.json:
        tensors = [{"key": key, **record} for key, record in found]
        return json.dumps({"store": block, "devices": store.paths(), "space": space, "tensors": tensors}, indent=2)
    lines = [f"{record['bytes']:>14} {record['dtype']:<10} {_shape(record):<18} {key}" for key, record in found]
    total = sum(record["bytes"] for _, record in found)
    lines.append(
        f"{len(found)} tensors, {total:,} bytes; {space['free_bytes']:,} of {space['data_bytes']:,} bytes free; "
        f"owner '{block['owner']}', {space['processes'] - 1} other processes"
    )
    return "\n".join(lines)


def _shape(record: dict[str, Any]) -> str:
    return "x".join(map(str, record["shape"])) or "scalar"


def _verify(options: argparse.Namespace) -> str:
    """Verify all tensors of a store. Damaged ones are erased with `--repair`, and raise ValueError without it."""
    store = _open(options)
    verified = {key: store.verify(key) for key, _ in store.list()}
    # The others were erased since they were listed.
    found = {key: (record, problem) for key, (record, problem) in verified.items() if record}
    damaged = {key: problem for key, (_, problem) in found.items() if problem}
    unchecked = [key for key, (record, _) in found.items() if record["checksum"] is None and record["bytes"]]
    if damaged and not options.repair:
        first, problem = next(iter(damaged.items()))
        raise ValueError(
            f"{len(damaged)} of {len(found)} tensors are damaged: {', '.join(damaged)} ({first}: {problem}): write "
            "them again, or erase them with --repair"
        )
    replaced = _erase_versions(store, {key: found[key][0]["generation"] for key in damaged})
    erased = {key: problem for key, problem in damaged.items() if key not in replaced}
    if options.json:
        report = {"tensors": len(found), "erased": erased, "replaced": replaced, "without_checksum": unchecked}
        return json.dumps(report, indent=2)
    notes = f", {len(unchecked)} without a checksum" if unchecked else ""
    notes += f", {len(erased)} damaged ones erased: {', '.join(erased)}" if erased else ""
    notes += f", {len(replaced)} damaged ones written again meanwhile: {', '.join(replaced)}" if replaced else ""
    return f"{len(found) - len(damaged)} tensors are whole{notes}"


def _erase_versions(store: Any, generations: dict[str, int]) -> list[str]:
    """Erase these versions of tensors. Return the keys under which another process has written a newer one."""
    for key, generation in generations.items():
        store.erase(key, generation)
    store.commit()
    return [key for key in generations if store.find(key) is not None]


def _collect(options: argparse.Namespace) -> str:
    """Remove what dead processes have left in folders or in a store, and in shared memory."""
    from memascend.storage.shared_memory import collect_shared_memory

    _require_existing(options.devices, "name a folder, or the devices of a store")
    folders = [device for device in options.devices if os.path.isdir(device)]
    if folders and len(folders) < len(options.devices):
        raise ValueError("gc takes the devices of one store, or folders: name one kind at a time")
    lines = _collect_folders(options) if folders else [_collect_store(options)] if options.devices else []
    left = collect_shared_memory(options.control_folder)
    return "\n".join(
        [*lines, *map(str, left), f"{len(left)} files of dead processes removed from {options.control_folder}"]
    )


def _collect_folders(options: argparse.Namespace) -> list[str]:
    from memascend.storage.scratch import collect_scratch_files

    removed = [each for folder in options.devices for each in collect_scratch_files(folder, options.control_folder)]
    return [*map(str, removed), f"{len(removed)} scratch files removed"]


def _collect_store(options: argparse.Namespace) -> str:
    store = _open(options)
    before = store.space()["log_used_bytes"]
    dropped = store.collect()
    return f"log {before} -> {store.space()['log_used_bytes']} bytes, {dropped} reservations of dead processes freed"


def _destroy(options: argparse.Namespace) -> str:
    """Destroy a store, after comparing its owner and the serial numbers of its devices with the given ones."""
    from memascend.storage.native import _C

    _require_existing(options.devices, "name the devices of a store")
    _require_distinct(options.devices)
    for path, word in zip(options.devices, _words(options)):
        report = checks.require_usable(path)
        if report.owner != options.owner:
            raise checks.DeviceRefused(f"{path} belongs to '{report.owner}', not to '{options.owner}'")
        checks.require_word(report, word)
    _C.Store(options.devices, options.owner, options.control_folder, 1 << 20, False)  # checks that all devices are its
    _C.storage_destroy(options.devices)
    return f"the store of '{options.owner}' on {', '.join(options.devices)} is gone"
