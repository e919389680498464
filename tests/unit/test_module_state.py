"""Values that attributes refer to are recognised by their contents, and restored."""

import array
import collections
import dataclasses
import enum
import threading
import types

import numpy
import pytest
import torch
from torch import nn

from memascend import streaming
from memascend.engine.module_state import ModuleState, ValuesAreGone, undisturbed
from memascend.ops.adamw import AdamW

WIDTH = 8


class Holder:
    def __init__(self, value=0):
        self.value = value


class Slotted:
    __slots__ = ("never", "value")

    def __init__(self):
        self.value = 0


class SlottedWithMore(Slotted):
    __slots__ = ("__dict__", "__hidden")


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: list


def add_to_value(holder):
    holder.value += 1
    return holder.value


def add_in_place(each):
    each += 1
    return float(each.reshape(-1)[0])


def append(values):
    values.append(1)
    return len(values)


def count(counts):
    counts["n"] += 1
    return counts["n"]


def first(change):
    return lambda values: change(values[0])


def of_holder(change):
    return lambda holder: change(holder.value)


def add_to_dict(values):
    values["n"] = values.get("n", 0) + 1
    return values["n"]


def add_to_first(values):
    values[0] += 1
    return values[0]


KINDS = {
    "a NumPy array": (lambda: numpy.zeros(1), add_in_place),
    "every second element of a NumPy array": (lambda: numpy.zeros(6)[::2], add_in_place),
    "a NumPy array of objects": (lambda: numpy.array([Holder()]), first(add_to_value)),
    "a Counter": (collections.Counter, count),
    "a defaultdict": (lambda: collections.defaultdict(int), count),
    "an OrderedDict": (collections.OrderedDict, add_to_dict),
    "a bytearray": (lambda: bytearray(1), add_to_first),
    "an array.array": (lambda: array.array("d", [0.0]), add_to_first),
    "a deque of limited length": (lambda: collections.deque([0, 0], maxlen=3), append),
    "an object": (Holder, add_to_value),
    "a namespace": (lambda: types.SimpleNamespace(value=0), add_to_value),
    "an object with slots": (Slotted, add_to_value),
    "an object with slots and attributes": (SlottedWithMore, add_to_value),
    "an object in a list": (lambda: [Holder()], first(add_to_value)),
    "an object in a tuple": (lambda: (Holder(), 1), first(add_to_value)),
    "a list in an object": (lambda: Holder([]), of_holder(append)),
    "a list in a frozen dataclass": (lambda: Frozen([]), lambda frozen: append(frozen.values)),
    "an array in an object in a list": (lambda: [Holder(numpy.zeros(1))], first(of_holder(add_in_place))),
    "a tensor in an object": (lambda: Holder(torch.zeros(1)), of_holder(add_in_place)),
    "an object in a list in a dict": (lambda: {"a": [Holder()]}, lambda values: add_to_value(values["a"][0])),
    "a list in the third object": (lambda: Holder(Holder(Holder([]))), of_holder(of_holder(of_holder(append)))),
}


class Scheduled(nn.Module):
    """A module whose residual grows with the number of passes, which `state` counts."""

    def __init__(self, state, change):
        super().__init__()
        self.linear, self.state, self.change = nn.Linear(WIDTH, WIDTH), state, change

    def forward(self, x):
        return x + self.linear(x).tanh() * (1 + 0.05 * self.change(self.state))


def losses(of, optimizer):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = of(torch.randn(4, WIDTH)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_state_advanced_by_a_block_ends_as_after_one_pass(tmp_path, kind):
    make, change = KINDS[kind]

    def model():
        torch.manual_seed(0)
        return nn.Sequential(*[Scheduled(make(), change) for _ in range(2)])

    ours, theirs = model(), model()
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        assert losses(ours, session.optimizer(torch.optim.AdamW, lr=0.1)) == losses(
            theirs, AdamW(theirs.parameters(), lr=0.1)
        )


def holding(value):
    module = nn.Module()
    module.value = value
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_change_is_reported_and_undone(kind):
    make, change = KINDS[kind]
    value = make()
    state = ModuleState([holding(value)])
    assert list(state.changes()) == []
    after_one = change(value)
    assert len(list(state.changes())) == 1
    state.forget_unchanged()
    state.restore()
    assert change(value) == after_one


def test_empty_slot_is_empty_after_restore():
    value = Slotted()
    state = ModuleState([holding(value)])
    value.never = 1
    assert list(state.changed_attributes()) == [(value, "never")]
    state.restore()
    assert not hasattr(value, "never")


def test_restore_keeps_deque_length_and_ordered_dict_order():
    length, order = collections.deque([1, 2], maxlen=2), collections.OrderedDict(a=1, b=2)
    state = ModuleState([holding([length, order])])
    length.append(3)
    order.move_to_end("a")
    state.restore()
    assert (list(length), length.maxlen, list(order)) == ([1, 2], 2, ["a", "b"])


def test_renamed_attribute_with_the_same_value_is_a_change():
    modules = [holding(1), holding(None), holding(2)]
    state = ModuleState(modules)
    del modules[1].value
    modules[1].other = None
    assert sorted(name for _, name in state.changed_attributes()) == ["other", "value"]
    state.restore()
    assert [each.value for each in modules] == [1, None, 2]
    assert not hasattr(modules[1], "other")


def test_cyclic_references_are_visited_once():
    holder, values = Holder(), []
    holder.value, holder.own = values, holder
    values += [holder, values, {"a": holder}]
    state = ModuleState([holding(holder)])
    values.append(1)
    state.restore()
    assert len(values) == 3


class Sly:
    """An object that fails the test when its attributes are accessed."""

    __slots__ = ("__dict__", "_value")

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was requested")

    @property
    def value(self):
        raise AssertionError("the property was requested")


class Callable(Holder):
    def __call__(self):
        pass


class Color(enum.Enum):
    RED = 1


def test_objects_that_are_not_values_are_kept_by_reference(tmp_path):
    linear = nn.Linear(1, 1)
    with open(tmp_path / "file", "w") as file:
        kept = [linear, linear.weight, Sly(), Callable(), Holder, len, threading.Lock(), threading.Event(), file, types]
        kept += [Color.RED, memoryview(b"a"), iter([1]), numpy.float32(1), b"a", frozenset([1]), torch.float32]
        state = ModuleState([holding(kept), holding(Holder(kept))])
        with torch.no_grad():
            linear.weight += 1
        linear.extra = 1
        weight = linear.weight.clone()
        before = list(kept)
        kept.reverse()
        state.restore()
    assert all(a is b for a, b in zip(kept, before, strict=True))
    assert torch.equal(linear.weight, weight)
    assert linear.extra == 1


def test_internals_of_standard_library_objects_are_left_alone():
    event = threading.Event()
    waiting = event._cond._waiters
    state = ModuleState([holding(Holder(event))])
    waiting.append(1)
    state.restore()
    assert list(waiting) == [1]


def test_a_read_only_array_is_left_alone():
    values = numpy.zeros(2)
    values.flags.writeable = False
    state = ModuleState([holding(values)])
    state.restore()
    assert list(state.changes()) == []


def test_large_unchanged_array_is_not_kept_and_its_loss_reported():
    values = numpy.zeros(1000)
    state = ModuleState([holding(values)])
    state.forget_unchanged()
    state.restore()
    values[3] = 1
    with pytest.raises(ValuesAreGone, match=r"float64 \(1000,\)"):
        state.restore()


def test_undisturbed_restores_objects_that_a_pass_made_unreachable():
    module, holder = holding([]), Holder()
    module.value.append(holder)
    entry = ModuleState([module])
    add_to_value(module.value.pop())
    holder.value = 7
    with undisturbed([module], entry):
        assert module.value == [holder]
        assert holder.value == 0
        add_to_value(module.value.pop())
    assert module.value == []
    assert holder.value == 7


def test_numpy_random_numbers_repeat_even_with_a_cached_normal():
    for before in range(3):
        numpy.random.seed(before)
        numpy.random.randn(before)
        ModuleState([])
        state = ModuleState([])
        assert not state.drawn()
        drawn = numpy.random.randn(1)
        assert state.drawn()
        state.forget_unchanged()
        state.restore()
        assert numpy.random.randn(1) == drawn
