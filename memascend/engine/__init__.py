"""The streaming engine: moves tensors of a model between storage and a device, through a few host buffers.

This package does not depend on DeepSpeed. It has a complete runtime, and the stream of weights, which any runtime with
offloaded weights can use:

    engine = StreamingEngine.start(model, folder, groups)   # keeps weights, gradients and optimizer states in `folder`
    model(...).loss.backward()                              # blocks are streamed; updates run during backward
    engine.finish_step()                                    # the step is committed: a kill from here on loses nothing

    stream = WeightStream(tier, pool=pool)              # memascend.storage.tier, memascend.memory.pools
    for name, numel in sizes.items():
        stream.register(name, numel)
    stream.read_ahead(["block.0", "block.1", "block.2"])  # in this order, as slots and budget allow
    (weights,) = stream.fetch(["block.0"])              # waits for its read
    ...                                                 # copy to the device, or compute from the host buffer
    stream.copied("block.0", event)                     # the slot may be reused once the event has passed
    stream.release("block.1")                           # or: the slot is returned

The modules, from the user's loop down to the drive:

- `streaming` is the interface for a training loop, `streamed_optimizer` its optimizer, `saved` and `saving` its saves,
  `options` its options, and `errors` the errors that it raises.
- `runtime`: `StreamingEngine`, in layers: `accumulation` (with `vertical` and `side_by_side`), `passes`,
  `gradient_access`, `steps`, `engine_state`. `hooks` attaches them to the model. `gradient_views`, `model_guards`,
  `placeholder_parameters` and `outside_use` handle a loop's own use of gradients and parameters that are not in memory.
- `recompute` recomputes blocks in backward, with `block_forward`, `block_runtime`, `saved_tensors` and `module_state`;
  `matrices` does so for a large embedding or head in slices; `swap` decides which activations go to the SSD
  (LoHan IV-D).
- `updates` applies gradients to the states (LoHan IV-C): `pieces`, `adam_steps`, `adam_settings`, `square_sums`.
- `model_units` and `find_blocks` divide a model into units, and `layout` defines where each element is. `unit_weights`
  loads and frees weights, through the `WeightStream` of `weights`, with `buffer_table`, which leases slots of
  `buffers`.
- `state_store` keeps all of it on the tier, with the last completed step: in two versions, or in one
  (`in_place_update`). `opening` creates or opens a store, `scratch_storage` holds other data on the tier, and
  `mmap_parameters` a model's values before they are moved to the store.
- `profile` measures how fast a step is and could be (`limit`); `traffic` counts its bytes for a plan.
- `protocols`: the interfaces that the stream requires of a storage (`Storage`, `Completion`), of a device (`Event`) and
  of a runtime that counts uses by itself (`Owner`, as DeepSpeed does).

Users: LoHan (`baselines/lohan`) through `memascend.training.backends.streaming`. The stream alone is used by the
parameter swapper of `memascend.integrations.deepspeed`; tests/unit/test_streamed_blocks.py trains a plain module whose
blocks pass through two slots.
"""

from .buffer_table import StreamOptions, StreamStatistics
from .protocols import Completion, Event, Owner, Storage, Use
from .weights import WeightStream

__all__ = ["Completion", "Event", "Owner", "Storage", "StreamOptions", "StreamStatistics", "Use", "WeightStream"]
