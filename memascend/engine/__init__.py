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

- `runtime`: `StreamingEngine`; `options`: what may be chosen of it. `layout` divides a model into units and pieces,
  `state_store` keeps them on the tier in two versions, or `in_place_update` in one, `scratch_storage` has what else is
  there, `mmap_parameters` a model's values before that. `blocks` brings weights in and recomputes, `matrices` does so
  for a large embedding or head by slices, `updates` takes gradients into the states (LoHan IV-C), `swap` decides which
  activations are swapped (IV-D), `profile` measures how fast a step is and could be (`limit`), `buffers` holds all host
  memory, for plans too. `streaming` is the interface of a user's loop; `hooks` puts the engine into the model,
  `gradient_views` and `model_guards` are what the loop meets in `parameter.grad` and in the model's own methods.
- `protocols`: what the stream asks of a storage (`Storage`, `Completion`), of a device (`Event`) and of a runtime that
  keeps the account of uses itself (`Owner`, as DeepSpeed does).
- `weights`: `WeightStream`; `buffer_table`: leases on pool slots by key, the read-ahead queue, eviction, statistics.

Users: LoHan (`baselines/lohan`) by `memascend.training.backends.streaming`. Of the stream alone: the parameter swapper
of `memascend.integrations.deepspeed`; tests/unit/test_streamed_blocks.py trains a plain module whose blocks pass
through two slots.
"""

from .buffer_table import StreamOptions, StreamStatistics
from .protocols import Completion, Event, Owner, Storage, Use
from .weights import WeightStream

__all__ = ["Completion", "Event", "Owner", "Storage", "StreamOptions", "StreamStatistics", "Use", "WeightStream"]
