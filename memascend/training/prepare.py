"""Preparation of a run before the ranks start: model sizes, tokenizer, tokens, and the memory the run will need.

It runs in a process of its own, so that its memory is released when training begins. A resumed run skips it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend import systems
from memascend.memory.cgroup import host_memory
from memascend.planner import ModelSpec, model_spec
from memascend.planner.options import default_context, longest_context
from memascend.planner.spec import fused_experts
from memascend.planner.tensors import TensorSpec, named_tensors
from memascend.storage.atomic_write import write_atomically
from memascend.systems import arrangement
from memascend.training import data, recorded_text
from memascend.training.backends import IN_MEMORY
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder
from memascend.training.processes import die_with_parent

if TYPE_CHECKING:
    from memascend.planner.workload import Workload

_WEIGHT_BYTES, _GROUPED_ALIGNMENT = 2, 16  # torch._grouped_mm requires strides that are multiples of 16 bytes


def prepare(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """Write the tokenizer, the token files and finally `prepared.json`; return the content of the latter.

    Raises a one-line ValueError.
    """
    source, model_config = resolve_model(config)
    notes: list[str] = []
    if (policy := config.activation_policy()) is not None:
        policy.per_block(int(model_config["num_hidden_layers"]), "'activations'")
    context = _context(config, model_config)
    sizes = _sizes(config, model_config)
    in_memory = config.system == IN_MEMORY
    facts = {
        "model_folder": None if config.initialised else str(source),
        "model_config": model_config,
        "context": context,
        **sizes,
        **(_in_memory(config, sizes["parameters"]) if in_memory else _plan(config, model_config, context, notes)),
    }
    if in_memory:
        facts["what_fits"] = _systems_that_fit(config, model_config, context, facts["planned_components"])
    try:
        facts |= _text(config, folder, source, model_config, context, notes)
    finally:
        shutil.rmtree(folder.partial_text, ignore_errors=True)
    facts["notes"] = notes
    write_atomically(folder.prepared, json.dumps(facts, indent=1))
    return facts


def resolve_model(config: TrainConfig) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder of weights and tokenizer (None if there is none) and the model's configuration."""
    from memascend.integrations import pretrained

    if config.twin > 1:
        return _folder_of(config.model), _twin(config).hf_config_dict()
    if config.initialised:
        with contextlib.suppress(ValueError):
            return _folder_of(config.model), model_spec(config.model).hf_config_dict()
        source = pretrained.local_folder(config.model)
        return source, pretrained.configuration(source)
    source = pretrained.local_folder(_hub_name(config.model))
    if not pretrained.has_weights(source):
        raise ValueError(f"{source} holds no weights (*.safetensors); add --random-weights to initialise them")
    return source, pretrained.configuration(source)


def _twin(config: TrainConfig) -> ModelSpec:
    """Return the model with its widths divided.

    Raises ValueError if the model has no such twin, or none that torch's kernels support.
    """
    spec = model_spec(config.model).fused(fused_experts("auto")).twin(config.twin)
    if spec.fused_experts and spec.expert_intermediate * _WEIGHT_BYTES % _GROUPED_ALIGNMENT:
        raise ValueError(
            f"the experts of {config.model} divided by {config.twin} are {spec.expert_intermediate} wide, and torch's "
            "product of fused experts needs multiples of 8; use a smaller --twin"
        )
    return spec


def _folder_of(model: str) -> Path | None:
    """Return the path of a local model, or None if `model` is not a folder with a config.json."""
    path = Path(model).expanduser()
    return path if (path / "config.json").is_file() else None


def _hub_name(model: str) -> str:
    """Return the hub name of a committed model name such as qwen2.5-0.5b; other names are returned unchanged."""
    if "/" in model or Path(model).exists():
        return model
    with contextlib.suppress(ValueError):
        return str(model_spec(model).config["_memascend"]["hub"])
    return model


def _context(config: TrainConfig, model_config: dict[str, Any]) -> int:
    """Return the tokens per sequence. Raises ValueError if they exceed the model's maximum."""
    most = longest_context(model_config)
    if config.context and most and config.context > most:
        raise ValueError(f"the model takes at most {most} tokens per sequence, not {config.context}; lower --context")
    return config.context or default_context(model_config)


def _tensors(model_config: dict[str, Any]) -> list[TensorSpec]:
    """Return the model's parameters, with their blocks as far as the names tell them."""
    from memascend.integrations.pretrained import parameter_shapes

    shapes = parameter_shapes(model_config)
    try:
        return list(named_tensors(shapes))
    except ValueError:  # a tensor of unknown role is streamed like one outside the blocks
        return [TensorSpec(name, shape, None) for name, shape in shapes]


def _sizes(config: TrainConfig, model_config: dict[str, Any]) -> dict[str, int]:
    """Return the number of parameters and the sizes of DeepSpeed's buffers, in elements of one rank's partitions."""
    from memascend.planner.derived_sizes import sub_group_size
    from memascend.planner.pool import SWAP_THRESHOLD_BYTES, partition_numel, swap_buffers

    tensors = _tensors(model_config)
    threshold = SWAP_THRESHOLD_BYTES / config.twin**2
    return {
        "parameters": sum(tensor.numel for tensor in tensors),
        "sub_group_size": sub_group_size([[partition_numel(tensor.numel, config.ranks) for tensor in tensors]]),
        **swap_buffers(tensors, ranks=config.ranks, threshold_bytes=threshold),
    }


def _spec(config: TrainConfig, model_config: dict[str, Any]) -> ModelSpec:
    from memascend.planner.spec import spec_from_config

    if config.twin > 1:
        return _twin(config)
    return spec_from_config(model_config, name=config.model, display=config.model).fused(fused_experts("auto"))


def workload_of_run(config: TrainConfig, spec: ModelSpec, context: int) -> Workload:
    """Return the planner's workload for this run.

    With several tiers, the plan includes the sub-groups that are cached in host memory.
    """
    import torch

    from memascend.planner.workload import workload_asked_for

    over: dict[str, Any] = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    over["saves_meanwhile"] = config.saves_meanwhile
    if config.tiers:
        over |= {"system": config.system, "arm": config.arm}
        if config.system == "memascend":
            over |= {"system": "mlp_offload", "arm": "weights_on_paths"}
        own = arrangement(over["system"], over["arm"])
        parts = {**own.parts, **arrangement(config.system, config.arm).parts, "tiers": config.tiers}
        over["parts"] = replace(own, parts=parts)
    return workload_asked_for(config, spec, context, config.ranks, **over)


def _plan(config: TrainConfig, model_config: dict[str, Any], context: int, notes: list[str]) -> dict[str, Any]:
    """Return the bytes of host memory and swap files that the planner predicts.

    The values are None if the planner does not support the model or the system, and a note says so. Raises
    HostMemoryTooSmall if the plan exceeds the run's limit on host memory.
    """
    from memascend.planner.host_budget import HostMemoryTooSmall, require_host_memory
    from memascend.planner.limits import stored_within

    try:
        work = workload_of_run(config, _spec(config, model_config), context)
        planned = require_host_memory(work)
    except HostMemoryTooSmall:
        raise
    except ValueError as error:
        notes.append(f"host memory was not planned: {error}")
        return {"planned_host_bytes": None, "planned_components": {}, "planned_swap_bytes": None}
    if config.state_versions == "checkpoint" and (config.checkpoints != "full" or not config.save_every):
        ways = "set --save-every" if config.checkpoints == "full" else "use --checkpoints full and --save-every"
        notes.append(
            "a kill in the middle of an update loses the run: nothing else is kept with state_versions checkpoint, "
            f"and no full checkpoint is saved before the end ({ways})"
        )
    swapped = least = None
    with contextlib.suppress(ValueError):  # raised for a system without a schedule
        swapped, least = (stored_within(work, space) for space in (None, 0))
    return {
        "planned_host_bytes": planned.host_bytes,
        "planned_components": planned.components(),
        "planned_swap_bytes": swapped,
        "least_swap_bytes": least,
        "what_fits": _what_fits(work, planned.host_bytes),
    }


def _what_fits(work: Workload, needed_bytes: int) -> list[str] | None:
    """Return changes that would each make the run fit into the available memory, or None if it already fits."""
    from memascend.planner.host_budget import what_fits

    available = host_memory().available_bytes
    return None if needed_bytes <= available else [change.text() for change in what_fits(work, available)]


def _systems_that_fit(
    config: TrainConfig, model_config: dict[str, Any], context: int, components: dict[str, int]
) -> list[str] | None:
    """Return up to two systems that would fit in place of training in memory; None if that already fits.

    This replaces `_what_fits` for training in memory, which the planner does not support.
    """
    from memascend.planner.footprint import plan
    from memascend.planner.host_budget import Change

    available, fits = host_memory().available_bytes, []
    if sum(components.values()) <= available:
        return None
    for name in systems.names():
        if name == IN_MEMORY or not systems.arrangement(name).runs:
            continue
        with contextlib.suppress(ValueError):  # raised if the system does not support this run's settings
            work = workload_of_run(replace(config, system=name, arm=None), _spec(config, model_config), context)
            if (needed := plan(work).host_bytes) <= available:
                fits.append(Change(settings={"system": name}, host_bytes=needed))
    return [change.text() for change in sorted(fits, key=lambda change: change.host_bytes)[:2]]


def _in_memory(config: TrainConfig, parameters: int) -> dict[str, Any]:
    """Return the counterpart of `_plan` for plain PyTorch: the host memory that persists between steps.

    Activations are not included. With a GPU the result is 0, since everything is in GPU memory.
    """
    import torch

    from memascend.planner.footprint import CPU_PROCESS_OVERHEAD_BYTES
    from memascend.planner.options import KEPT_STATE_BYTES

    components = {
        "weights": 0 if config.dtype == "fp32" else 2 * parameters,  # fp32 weights are their own masters
        "master weights and moments": round(KEPT_STATE_BYTES[config.states] * parameters),
        "gradients": (2 if config.gradients == "bf16" else 4) * parameters,
        "process overhead": CPU_PROCESS_OVERHEAD_BYTES,
    }
    if torch.cuda.is_available():
        components = {}
    return {
        "planned_host_bytes": sum(components.values()),
        "planned_components": components,
        "planned_swap_bytes": 0,
    }


def _text(
    config: TrainConfig,
    folder: RunFolder,
    source: Path | None,
    model_config: dict[str, Any],
    context: int,
    notes: list[str],
) -> dict[str, Any]:
    """Write tokenizer and token files; return the counts of documents, tokens and sequences. They replace earlier ones
    only when all are complete and agree with those that the run began with. Raises a one-line ValueError for text that
    cannot be used."""
    from memascend.integrations.text import Documents, Encoder

    def documents(sources: list[str]) -> Documents:
        return Documents(
            sources, pattern=config.files, field=config.text_field, subset=config.subset, split=config.split
        )

    texts = documents(config.data)
    shutil.rmtree(folder.partial_text, ignore_errors=True)
    folder.partial_text.mkdir()
    tokenizer, tokens = folder.partial_text / folder.tokenizer.name, folder.partial_text / folder.data.name
    _tokenizer(config, tokenizer, source, texts, model_config, notes)
    encode = Encoder(tokenizer)
    vocabulary = int(model_config["vocab_size"])
    if encode.size > vocabulary:
        raise ValueError(
            f"the tokenizer has {encode.size} ids and the model {vocabulary}; name the model's own with --tokenizer"
        )
    share = 0.0 if config.eval_data or not config.eval_sequences else config.eval_share
    counts = data.write_tokens(tokens, texts, encode, seed=config.seed, eval_share=share)
    if texts.skipped and not counts["train_tokens"] + counts["eval_tokens"]:
        raise ValueError(
            f"there is no text in {', '.join(config.data)}: {len(texts.skipped)} files are not UTF-8 text and were "
            f"skipped, such as {texts.skipped[0]}; name text with --data, or choose files with --files"
        )
    if texts.skipped:
        notes.append(f"skipped {len(texts.skipped)} files that are not UTF-8 text, such as {texts.skipped[0]}")
    if config.eval_data and config.eval_sequences:
        counted = data.write_tokens(tokens / "eval", documents(config.eval_data), encode, seed=0, eval_share=0)
        (tokens / "eval" / "train.tokens").replace(tokens / "eval.tokens")
        shutil.rmtree(tokens / "eval")
        counts |= {"eval_documents": counted["train_documents"], "eval_tokens": counted["train_tokens"]}
    counts |= _sequences(config, tokens, counts, context, share)
    recorded_text.require_recorded(folder, tokens)
    for made, path in ((tokenizer, folder.tokenizer), (tokens, folder.data)):
        shutil.rmtree(path, ignore_errors=True)
        made.rename(path)
    recorded_text.record(folder)
    return counts


def _sequences(config: TrainConfig, tokens: Path, counts: dict[str, int], context: int, share: float) -> dict[str, Any]:
    """Return the counts of whole sequences.

    If there are too few documents to split, the end of the text becomes the evaluation text. Raises ValueError if the
    text is too short for one step.
    """
    if share and counts["eval_tokens"] < context * config.ranks:
        total = counts["train_tokens"] // context
        tail = max(config.ranks, round(total * share)) * context
        if total * context >= 2 * tail:
            data.move_tail(tokens, tail)
            counts["train_tokens"] -= tail
            counts["eval_tokens"] = tail
    train = len(data.Sequences(tokens / "train.tokens", context))
    evaluation = len(data.Sequences(tokens / "eval.tokens", context))
    needed = config.batch * config.accumulate * config.ranks
    if train < needed:
        raise ValueError(
            f"the data holds {train} sequences of {context} tokens, and one step takes {needed} (batch {config.batch} "
            f"x accumulate {config.accumulate} x ranks {config.ranks}); give more text, or lower one of them or "
            "--context"
        )
    return {"train_sequences": train, "eval_sequences": evaluation, "steps_an_epoch": train // needed}


def _tokenizer(
    config: TrainConfig,
    folder: Path,
    source: Path | None,
    texts: Any,
    model_config: dict[str, Any],
    notes: list[str],
) -> None:
    """Save the tokenizer to `folder`: the named one, the model's, or for initialised weights one trained on the
    text."""
    from memascend.integrations.text import load_tokenizer, train_tokenizer

    named = config.tokenizer or source
    if named is not None and load_tokenizer(_tokenizer_folder(named), folder):
        pass
    elif config.tokenizer or not config.initialised:
        raise ValueError(f"no tokenizer can be loaded from {named}; name one with --tokenizer")
    else:
        train_tokenizer(texts, int(model_config["vocab_size"]), folder)
        notes.append("the model has no tokenizer here: one was trained on the text")


def _tokenizer_folder(named: str | Path) -> Path:
    """Return the local folder of a tokenizer, downloaded if `named` is a hub name. Raises ValueError."""
    from memascend.integrations.pretrained import local_folder

    path = Path(named).expanduser()
    try:
        return path if path.is_dir() else local_folder(str(named), weights=False)
    except ValueError as error:  # its advice is about models, not tokenizers
        raise ValueError(f"--tokenizer: {str(error).partition(';')[0]}; name a folder with a tokenizer") from None


def main() -> int:
    """Run `python -m memascend.training.prepare OUTPUT RESULT`: read OUTPUT/config.yaml, report errors in RESULT."""
    from memascend.training.launch import saved_config

    die_with_parent()
    folder, result = RunFolder(Path(sys.argv[1])), Path(sys.argv[2])
    try:
        prepare(saved_config(folder), folder)
    except (ValueError, OSError, MemoryError, ImportError) as error:
        result.write_text(json.dumps({"error": " ".join(str(error).split())}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
