"""GPU memory of one training step, buffer by buffer, for the stack that MemAscend builds up in Fig. 2.

Activations are the tensors that autograd saves in a Hugging Face decoder block, in bytes per token with 16-bit tensors
(h hidden, q and kv the widths of queries and of keys, f the feed-forward width, a heads, C the context):

* two norms 16 h + 8: each keeps its input in fp32, the scaled 16-bit value, its 16-bit output and a reciprocal root;
* attention 2q + 4kv + 2q: queries, keys, values, output; and 6aC of probabilities (eager, where keys and values are
  repeated for every head) or 4a of log-sums (flash);
* feed-forward 8f (gate, up, activated gate, product), 4f without a gate; in a mixture for the experts that a token
  visits.

This is Korthikanti et al. 2022, section 4.1 (34h + 5aC for GPT with dropout), adapted to RMSNorm, gates and grouped
keys; the tests compare it with what autograd really saves. Logits take 2 + 4 + 4 bytes per entry of B x C x V: 16-bit
values, fp32 log-probabilities and their gradient (or, in forward, the fp32 copy).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memascend import systems
from memascend.memory.ledger import DEVICE, Ledger, LedgerEntry
from memascend.ops.cross_entropy import DEFAULT_CHUNK_BYTES
from memascend.planner.options import KEPT_STATE_BYTES, Stack
from memascend.planner.pool import partition_numel
from memascend.planner.spec import ModelSpec
from memascend.planner.workload import Workload

# The stacks of Fig. 2 by their labels; each includes the previous ones.
STACKS = {
    "ZeRO-Infinity": Stack(attention="eager", loss="plain", checkpointing="none"),
    "+GC": Stack(attention="eager", loss="plain", checkpointing="plain"),
    "+Liger/Flash": Stack(attention="flash", loss="chunked", checkpointing="plain", fused=True),
    "+Offloaded-GC": Stack(attention="flash", loss="chunked", checkpointing="offloaded", fused=True),
}
# Hugging Face, "Model training anatomy": kernels and context alone take 1.3 GB of GPU memory.
CONTEXT_BYTES = 1_300_000_000
# DeepSpeed's reduce_bucket_size and stage3_prefetch_bucket_size, in elements, as baselines/ configure them.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
# Checkpoints on the GPU while offloading: one in use, one in transfer.
CHECKPOINTS_IN_FLIGHT = 2
# Blocks whose activations are on the GPU while those of the others are on the SSD (SSDTrain, III-D).
RESIDENT_BLOCKS = 2
LOGIT_BYTES = 2 + 4 + 4
_GATE = re.compile(r"gate_proj|gate_up_proj|\.w3\.")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The ledger of one GPU at the instant of a step's peak memory."""

    entries: tuple[LedgerEntry, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes of all entries: the peak of one GPU's memory."""
        return sum(entry.reserved_bytes for entry in self.entries)

    def components(self) -> dict[str, int]:
        """Return the bytes by name, in the order in which they were recorded."""
        return {entry.name: entry.reserved_bytes for entry in self.entries}


def block_bytes_per_token(spec: ModelSpec, context: int, *, flash: bool, fused: bool) -> int:
    """Return the bytes per token that autograd saves in one block.

    `flash`: attention that saves no scores. `fused`: norms and gates as single kernels (Liger).
    """
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norms = 8 * spec.hidden + 8 if fused else 16 * spec.hidden + 8
    if flash:
        attention = 2 * (query + 2 * keys) + 2 * query + 4 * spec.heads
    else:
        attention = 2 * 3 * query + 2 * query + 6 * spec.heads * context
    return norms + attention + _feed_forward(spec, fused) + _head_norms(spec, query, keys)


def megatron_bytes_per_token(spec: ModelSpec, gpus: int) -> int:
    """Return the bytes per token that `gpus` GPUs together save in a block of Megatron's GPT or BERT, without scores.

    Korthikanti et al. 2022, section 4.2.1, for tensor parallelism without sequence parallelism: each GPU keeps 10 h in
    full (inputs of two norms and of the products after them, dropout masks) and its share of 24 h.
    """
    return (10 * gpus + 24) * spec.hidden


def is_gated(spec: ModelSpec) -> bool:
    """Return whether the feed-forward is gated, i.e. multiplies two products elementwise (SwiGLU and variants)."""
    return any(_GATE.search(tensor.name) for tensor in spec.tensors() if tensor.block == 0)


def _feed_forward(spec: ModelSpec, fused: bool) -> int:
    """Return the bytes per token that autograd saves in a block's feed-forward, or in the experts that it visits."""
    an_element = (6 if fused else 8) if is_gated(spec) else 4
    if not spec.experts:
        return an_element * spec.intermediate
    dispatched = 2 * 2 * spec.hidden  # for each expert that a token visits, a copy of its input and of its output
    visited = spec.experts_per_token * (an_element * spec.expert_intermediate + dispatched)
    return visited + an_element * spec.shared_intermediate


def _head_norms(spec: ModelSpec, query: int, keys: int) -> int:
    """Return the bytes per token of the norms of queries and keys (Qwen3).

    They save the fp32 input, the scaled value, and one reciprocal root per head.
    """
    if not any(".q_norm." in tensor.name for tensor in spec.tensors()[:20]):
        return 0
    return 6 * (query + keys) + 4 * (spec.heads + spec.kv_heads)


def logits_bytes(spec: ModelSpec, tokens: int, *, chunked: bool) -> int:
    """Return the bytes of the loss: all logits, or one chunk of `memascend.ops.cross_entropy` (`chunked`).

    The chunked loss also stores the gradient of its input (2 h bytes per token); the gradient of the output matrix is a
    separate entry of the ledger.
    """
    if not chunked:
        return LOGIT_BYTES * tokens * spec.vocab
    return min(LOGIT_BYTES * tokens * spec.vocab, DEFAULT_CHUNK_BYTES) + 2 * tokens * spec.hidden


def gpu_memory(work: Workload) -> DevicePlan:
    """Return the ledger of one GPU at its peak: in backward, with one recomputed block, or the loss if that is larger.

    With activations on the SSD, those of two blocks remain, assuming that the drive absorbs them as fast as they are
    produced. With offloaded parameters, the GPU holds the largest tensor and what DeepSpeed prefetches. `all_in_gpu`
    needs 16 bytes per parameter with states in fp32, and all checkpoints. On a CPU the same tensors are in host memory
    (see `footprint.plan`).
    """
    spec, stack, context = work.spec, work.stack, work.context
    tokens, area, ledger = work.batch * context, spec.k * spec.k, Ledger()

    def hold(name: str, owner: str, size: int) -> None:
        ledger.record(name, owner, size, role=DEVICE, allocator="torch")

    if not work.on_cpu:
        hold("CUDA context and kernels", "device_context", CONTEXT_BYTES)
    if not work.offloads:
        each = 2 + 2 + KEPT_STATE_BYTES[work.kept_states]  # weights and gradients of 16 bits
        hold("model states", "device_states", round(each * partition_numel(spec.parameters, work.ranks)))
    else:
        if work.arrangement.weights_on_gpu:
            hold("partitioned weights", "device_parameters", 2 * partition_numel(spec.parameters, work.ranks))
        largest = spec.largest().numel
        if not (work.on_cpu and getattr(systems.load(work.system), "computes_in_its_buffers", False)):
            gathered = largest + min(PREFETCH_BUCKET // area, spec.parameters)
            hold("gathered parameters", "device_parameters", 2 * gathered)
            hold("gradient bucket", "device_gradients", 2 * min(REDUCE_BUCKET // area, spec.parameters))
        hold("gradient of the largest tensor", "device_gradients", 2 * largest)
    checkpoint = 2 * tokens * spec.hidden
    block = tokens * block_bytes_per_token(spec, context, flash=stack.flash, fused=stack.fused)
    loss = logits_bytes(spec, tokens, chunked=stack.loss != "plain")
    if not stack.checkpoints:
        resident = min(RESIDENT_BLOCKS, spec.layers) if stack.checkpointing == "ssd" else spec.layers
        which = "all" if resident == spec.layers else resident
        hold(f"activations of {which} blocks", "device_activations", resident * block)
        hold("logits and loss", "device_loss", loss)
        return DevicePlan(entries=tuple(ledger.entries()))
    kept = CHECKPOINTS_IN_FLIGHT if work.offloads_checkpoints else spec.layers
    hold("activation checkpoints", "device_checkpoints", kept * checkpoint)
    working = block + _backward_transient(spec, tokens, context, flash=stack.flash)
    if loss > working:
        hold("logits and loss", "device_loss", loss)
    else:
        hold("activations of one block", "device_activations", working)
    return DevicePlan(entries=tuple(ledger.entries()))


def activation_writes(work: Workload) -> int:
    """Return the bytes of activations that a step of all GPUs writes to SSDs; 0 unless checkpointing is `ssd`.

    All blocks are written except the last one. Its activations and the logits stay on the GPU, because their backward
    comes before they could be read back.
    """
    if work.stack.checkpointing != "ssd":
        return 0
    tokens = work.batch * work.context * work.accumulation * work.ranks
    block = block_bytes_per_token(work.spec, work.context, flash=work.stack.flash, fused=work.stack.fused)
    return (work.spec.layers - 1) * tokens * block


def _backward_transient(spec: ModelSpec, tokens: int, context: int, *, flash: bool) -> int:
    """Return the bytes of gradients that coexist with a block's activations, of the feed-forward or of the scores.

    The feed-forward has gradients of three products. Eager attention has gradients of the probabilities in 16 bits and
    two copies of those of the scores in fp32: 10 a C per token.
    """
    inner = spec.intermediate if not spec.experts else spec.experts_per_token * spec.expert_intermediate
    feed_forward = 3 * 2 * inner
    scores = 0 if flash else 10 * spec.heads * context
    return tokens * max(feed_forward, scores)
