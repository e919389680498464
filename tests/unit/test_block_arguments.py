"""Arguments of blocks are taken apart and reassembled, whatever structure they have."""

import collections
import enum
import types
from dataclasses import dataclass

import pytest
import torch

from memascend.engine.arguments import Arguments, tensors_in


class Plain:
    def __init__(self, **values):
        vars(self).update(values)


class Slots:
    __slots__ = ("__secret", "missing", "value")

    def __init__(self, value, secret):
        self.value, self.__secret = value, secret

    @property
    def secret(self):
        return self.__secret


class OwnDict(dict):
    pass


class OwnList(list):
    pass


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Colour(enum.Enum):
    RED = 1


def rebuilt(value, change=lambda tensor: tensor + 1):
    arguments = Arguments((value,), {})
    (again,), _ = arguments.rebuilt([change(each) for each in arguments.tensors])
    return again


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda t: Plain(value=t), lambda o: o.value),
        (lambda t: Slots(t, 0), lambda o: o.value),
        (lambda t: Slots(0, t), lambda o: o.secret),
        (lambda t: OwnDict(value=t), lambda o: o["value"]),
        (lambda t: OwnList([t]), lambda o: o[0]),
        (lambda t: collections.UserDict(value=t), lambda o: o["value"]),
        (lambda t: types.SimpleNamespace(value=[t]), lambda o: o.value[0]),
        (lambda t: Frozen(t), lambda o: o.value),
        (lambda t: Plain(inner=Plain(values=[{"x": t}])), lambda o: o.inner.values[0]["x"]),
    ],
)
def test_tensors_are_replaced_without_changing_the_callers_object(make, look):
    tensor = torch.zeros(2)
    given = make(tensor)
    assert [each is tensor for each in tensors_in(given)] == [True]
    again = rebuilt(given)
    assert type(again) is type(given)
    assert again is not given
    assert look(again).tolist() == [1, 1]
    assert look(given) is tensor


def test_cycles_and_repeated_objects_are_preserved():
    given = Plain(value=torch.zeros(2))
    given.itself, given.twice = given, [given.value, given.value]
    again = rebuilt(given)
    assert again.itself is again
    assert again.twice[0] is again.twice[1] is again.value


def test_tensor_behind_a_cycle_is_found():
    outer, inner = Plain(), Plain()
    outer.inner, inner.outer, outer.value = inner, outer, torch.zeros(2)
    again = rebuilt([inner, outer])
    assert again[0].outer is again[1]
    assert again[1].inner is again[0]
    assert again[1].value.tolist() == [1, 1]


def test_objects_without_tensors_are_passed_unchanged():
    module, lock = torch.nn.Linear(2, 2), Plain(name="lock")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for value in (module, optimizer, lock, Colour.RED, len, Plain, "text", Plain(weight=module.weight)):
        assert rebuilt(value) is value
    assert list(tensors_in([module, optimizer, Colour.RED])) == []


def test_object_with_tensors_and_a_finalizer_is_refused():
    class Closing(Plain):
        def __del__(self):
            pass

    with pytest.raises(TypeError, match="type Closing holds tensors"):
        Arguments((Closing(value=torch.zeros(2)),), {})
    Arguments((Closing(value=3),), {})


def test_uncopyable_object_with_tensors_is_refused_by_type():
    class Single(Plain):
        def __copy__(self):
            raise RuntimeError("there is one of these")

    with pytest.raises(TypeError, match=r"type Single holds tensors, and copy\.copy: there is one"):
        Arguments((Single(value=torch.zeros(2)),), {})
