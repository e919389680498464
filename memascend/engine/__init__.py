"""The streaming engine: tensors of a model on their way between storage and a device, through a few host buffers.

Nothing here knows DeepSpeed. A whole runtime, and the part of it that any other over offloaded weights needs:

    engine = StreamingEngine.start(model, folder, groups)   # weights, gradients and optimizer states live in `folder`
    model(...).loss.backward()                              # blocks come and go; updates run meanwhile
    engine.finish_step()                                    # completed: a kill from here on loses nothing

    stream = WeightStream(tier, pool=pool)              # memascend.storage.tier, memascend.memory.pools
    for name, numel in sizes.items():
        stream.register(name, numel)
    stream.read_ahead(["block.0", "block.1", "block.2"])  # in this order, as far as slots and budget go
    (weights,) = stream.fetch(["block.0"])              # waits for its read
    ...                                                 # copy to the device, or compute from the host buffer
    stream.copied("block.0", event)                     # the slot may be taken once the event has passed
    stream.release("block.1")                           # or: the slot goes back

Where to look, from a user's loop down to the drive:

- `streaming` is the interface of a loop, `streamed_optimizer` its optimizer, `saved` and `saving` its saves, `options`
  what may be chosen, `errors` what is raised.
- `runtime`: `StreamingEngine`, in layers: `accumulation` (with `vertical` and `side_by_side`), `passes`,
  `gradient_access`, `steps`, `engine_state`. `hooks` puts them into the model; `gradient_views`, `model_guards`,
  `placeholder_parameters` and `outside_use` are what a loop meets of a model whose weights are elsewhere.
- `recompute` computes blocks again in backward, from what `block_forward`, `block_runtime`, `saved_tensors` and
  `module_state` know of them; `matrices` does so for a large embedding or head by slices; `swap` decides which
  activations go to the SSD (LoHan IV-D).
- `updates` takes gradients into the states (LoHan IV-C): `pieces`, `adam_steps`, `adam_settings`, `square_sums`.
- `model_units` and `find_blocks` divide a model into units, `layout` says where each element is; `unit_weights` brings
  weights in and out, through `weights`: `WeightStream`, with `buffer_table`, which lends the slots of `buffers`.
- `state_store` keeps it all on the tier, with the last completed step: in two versions, or in one (`in_place_update`);
  `opening` begins or finds one, `scratch_storage` has what else is on the tier, `mmap_parameters` a model's values
  before that.
- `profile` measures how fast a step is and could be (`limit`), `traffic` counts its bytes for a plan.
- `protocols`: what the stream asks of a storage (`Storage`, `Completion`), of a device (`Event`) and of a runtime that
  keeps the account of uses itself (`Owner`, as DeepSpeed does).

Users: LoHan (`baselines/lohan`) by `memascend.training.backends.streaming`. Of the stream alone: the parameter swapper
of `memascend.integrations.deepspeed`; tests/unit/test_streamed_blocks.py trains a plain module whose blocks pass
through two slots.
"""

from .buffer_table import StreamOptions, StreamStatistics
from .protocols import Completion, Event, Owner, Storage, Use
from .weights import WeightStream

__all__ = ["Completion", "Event", "Owner", "Storage", "StreamOptions", "StreamStatistics", "Use", "WeightStream"]
