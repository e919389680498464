"""The streaming engine with 8-bit moments: equal to `AdamW8bit` in memory
bit by bit, in 4.1 bytes per parameter on the SSD."""

import copy
import itertools

import pytest
import torch

from memascend.engine.errors import NotStreamable, NotThisModel
from memascend.engine.layout import Kind, UnitParameters, make_layout
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.ops.adamw import ROUNDING_SEED
from memascend.ops.adamw8 import AdamW8bit, decode_moments, rounding_bounds
from tests.unit.test_streaming_engine import SETTINGS, assert_equal, batches, groups, model, streamed, train
from tests.unit.test_streaming_loop import begin, loop

ODD = 40  # a norm of as many elements ends inside a block of 32
EIGHT = EngineOptions(states=torch.int8)


def odd(seed=0, **shape):
    return model(seed, dtype=torch.bfloat16, **{"depth": 2, "hidden": ODD, **shape})


def in_memory(of):
    return AdamW8bit([p for p in of.parameters() if p.requires_grad], **SETTINGS, seed=ROUNDING_SEED)


def train_in_memory(of, data, accumulate=1):
    optimizer, losses = in_memory(of), []
    for number, ids in enumerate(data, 1):
        loss = of(ids)
        loss.backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, optimizer


def assert_states_equal(engine, of, optimizer):
    """Check that weights, codes and scales are equal."""
    assert_equal(engine, of)
    for name, parameter in of.named_parameters():
        if parameter in optimizer.state:
            found = engine.read_states(name)
            assert list(found) == ["master", "exp_avg", "exp_avg_sq", "scales"]
            assert torch.equal(found["master"], parameter.flatten())
            for key in AdamW8bit.OWNERS:
                assert torch.equal(found[key], optimizer.state[parameter][key].flatten()), (name, key)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"arm": "naive"},
        {"arm": "none", "versions": 1},
        {"redo": False},
        pytest.param({"versions": 1, "accumulate": 2, "gradients": torch.bfloat16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_equal_those_of_the_optimizer_in_memory(tmp_path, chosen):
    ours, theirs, data = odd(), odd(), batches(4)
    engine = streamed(ours, tmp_path, states=torch.int8, **chosen)
    accumulate, losses = chosen.get("accumulate", 1), []
    for number, ids in enumerate(data, 1):
        loss = ours(ids)
        loss.backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            engine.finish_step()
    expected, optimizer = train_in_memory(theirs, data, accumulate)
    assert losses == expected
    assert_states_equal(engine, theirs, optimizer)
    engine.close()


def test_tensors_cut_into_pieces_are_rounded_as_a_whole(tmp_path):
    """Pieces of 65,536 elements; the parameters do not fit into one piece."""
    ours, theirs, data = odd(hidden=168), odd(hidden=168), batches(2)
    engine = streamed(ours, tmp_path, states=torch.int8, piece_elements=1 << 16)
    assert max(len(unit.pieces) for unit in engine.layout.units) > 2
    train(ours, engine, data)
    _, optimizer = train_in_memory(theirs, data)
    assert_states_equal(engine, theirs, optimizer)
    engine.close()


def test_frozen_parameters_have_no_states_and_take_no_element_numbers(tmp_path):
    ours, theirs, data = odd(), odd(), batches(2)
    for each in (ours, theirs):
        each.layers[0].norm.requires_grad_(False)
        each.embedding.requires_grad_(False)
    engine = streamed(ours, tmp_path, states=torch.int8)
    train(ours, engine, data)
    _, optimizer = train_in_memory(theirs, data)
    assert_states_equal(engine, theirs, optimizer)
    engine.close()


@pytest.mark.parametrize("width", [128, 4104])
def test_every_cut_begins_at_a_block(width):
    shapes = {"embedding.weight": (60_000, width), "norm.bias": (33,), "head.weight": (60_000, width)}
    block = [("a.weight", (3000, width), True), ("a.bias", (7,), True), ("b.weight", (width, 7), True)]
    units = [UnitParameters(key="block", kind=Kind.BLOCK, parameters=block)] + [
        UnitParameters(key=name, kind=Kind.RESIDENT, parameters=[(name, shape, True)], rows_of=name)
        for name, shape in shapes.items()
        if len(shape) == 2
    ]
    order = [(name, torch.Size(shape).numel()) for unit in units for name, shape, _ in unit.parameters]
    layout = make_layout(units, order, weights=torch.bfloat16, states=torch.int8)
    runs = [run for piece in layout.pieces for run in piece.runs]
    assert len(layout.units) > len(units)  # the matrices are in slices
    assert len(runs) > len(order)
    for run in runs:
        assert (run.part.offset + run.begin) % 32 == 0
        assert run.part.trained_first % 32 == 0
    wanted = [sum(-(-numel // 32) * 32 for _, numel in order[:number]) for number in range(len(order))]
    firsts = {run.part.name: run.part.trained_first - run.part.offset for run in runs}
    assert firsts == dict(zip((name for name, _ in order), wanted, strict=True))


def test_states_of_a_piece_do_not_overlap():
    parameters = [("a", (33,), True), ("b", (64,), True), ("c", (1,), True)]
    unit = UnitParameters(key="block", kind=Kind.BLOCK, parameters=parameters)
    layout = make_layout([unit], [("a", 33), ("b", 64), ("c", 1)], weights=torch.bfloat16, states=torch.int8)
    (piece,) = layout.pieces
    taken = [place for _, places in layout.state_places(piece) for place in places.values()]
    elements = list(itertools.chain.from_iterable(range(p.start, p.stop) for p in taken))
    assert len(set(elements)) == len(elements) == 2 * (33 + 64 + 1) + 2 * (2 + 2 + 1)
    assert max(elements) < layout.states_numel(piece) == 4096


def test_version_takes_less_than_4_2_bytes_per_parameter():
    width = 1024
    block = [(f"{n}.weight", (width, width), True) for n in range(8)] + [("norm.weight", (width,), True)]
    units = [
        UnitParameters(key=f"block {n}", kind=Kind.BLOCK, parameters=[(f"{n}.{name}", *rest) for name, *rest in block])
        for n in range(4)
    ]
    order = [(name, torch.Size(shape).numel()) for unit in units for name, shape, _ in unit.parameters]
    eight, brain = (
        make_layout(units, order, weights=torch.bfloat16, states=states) for states in (torch.int8, torch.bfloat16)
    )
    assert 4.06 < sum(eight.nbytes) / sum(numel for _, numel in order) < 4.07
    assert sum(brain.nbytes) / sum(numel for _, numel in order) > 6


def test_resume_after_incomplete_step_gives_the_same_bits(tmp_path):
    data, ours, theirs = batches(4), odd(), odd()
    engine = streamed(ours, tmp_path, states=torch.int8)
    train(ours, engine, data[:2])
    engine.keep({})
    ours(data[2]).backward()  # a step that is not completed
    engine.close()
    again = odd(seed=5)
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again), EIGHT)
    train(again, engine, data[2:])
    _, optimizer = train_in_memory(theirs, data)
    assert_states_equal(engine, theirs, optimizer)
    engine.close()


@pytest.mark.parametrize(("made", "asked"), [("int8", "bfloat16"), ("bfloat16", "int8")])
def test_store_with_other_state_types_is_refused_in_one_line(tmp_path, made, asked):
    streamed(odd(), tmp_path, states=getattr(torch, made)).close()
    again = odd(seed=5)
    with pytest.raises(
        NotThisModel, match=f"its states are {made}, and this model's {asked}. Create the model"
    ) as error:
        StreamingEngine.resume(again, tmp_path / "session", groups(again), EngineOptions(states=getattr(torch, asked)))
    assert "\n" not in str(error.value)
    options = EngineOptions(states=getattr(torch, made))
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again), options)
    assert_equal(engine, odd())
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_of_unsupported_type_are_refused_before_anything_moves(tmp_path, dtype):
    ours = model(dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NotStreamable, match=f"need bfloat16 weights.* these are {name}: convert the model") as error:
        streamed(ours, tmp_path, states=torch.int8)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert not torch.isnan(ours.head.weight).any()


def test_state_dict_continues_in_another_folder_and_in_memory(tmp_path):
    data, ours, theirs = batches(4), odd(), odd()
    session, optimizer = begin(ours, tmp_path / "run", options=EIGHT)
    other = in_memory(theirs)
    assert loop(ours, optimizer, data[:2]) == loop(theirs, other, data[:2])
    saved, weights = optimizer.state_dict(), ours.state_dict()
    session.remove()
    expected = other.state_dict()["state"]
    assert saved["state"].keys() == expected.keys()
    for number, state in expected.items():
        assert state.keys() == saved["state"][number].keys()
        for key, value in state.items():
            assert torch.equal(saved["state"][number][key], value), key
    plain = odd(seed=9)
    plain.load_state_dict(weights)
    again = copy.deepcopy(plain)
    session, optimizer = begin(again, tmp_path / "again", options=EIGHT)
    optimizer.load_state_dict(saved)
    memory = in_memory(plain)
    memory.load_state_dict(saved)
    assert loop(again, optimizer, data[2:]) == loop(theirs, other, data[2:]) == loop(plain, memory, data[2:])
    assert_equal(session.engine, theirs)
    session.close()


def of_torch(of, data):
    """Train with torch's AdamW; return its state dict, whose keys are the numbers of parameters."""
    optimizer = torch.optim.AdamW(of.parameters(), **SETTINGS)
    loop(of, optimizer, data)
    return optimizer.state_dict()


def test_states_of_torch_adamw_become_codes_within_rounding_bounds(tmp_path):
    ours, saved = odd(hidden=168), of_torch(odd(hidden=168), batches(2))
    session, optimizer = begin(ours, tmp_path / "run", options=EIGHT)
    optimizer.load_state_dict(saved)
    assert session.steps == 2
    for number, name in enumerate(name for name, _ in ours.named_parameters()):
        found, wanted = session.engine.read_states(name), saved["state"][number]
        momentum, variance = decode_moments(found["exp_avg"], found["exp_avg_sq"], found["scales"].view(-1, 2))
        of_momentum, of_root = rounding_bounds(wanted["exp_avg"].flatten(), wanted["exp_avg_sq"].flatten())
        assert ((momentum - wanted["exp_avg"].flatten().float()).abs() <= of_momentum).all()
        root = wanted["exp_avg_sq"].flatten().float().sqrt()
        assert ((variance.sqrt() - root).abs() <= torch.maximum(of_root, torch.tensor(2.0**-120))).all()
    loop(ours, optimizer, batches(1))
    session.close()


def changed(saved, key, value):
    state = dict(saved["state"])
    state[0] = {**state[0], key: value}
    return {**saved, "state": state}


def test_invalid_states_are_refused_and_nothing_changes(tmp_path):
    ours, numbers = odd(), of_torch(odd(), batches(1))
    session, optimizer = begin(ours, tmp_path / "run", options=EIGHT)
    loop(ours, optimizer, batches(1))
    codes = optimizer.state_dict()
    variance, scales = numbers["state"][0]["exp_avg_sq"], codes["state"][0]["scales"]
    bad = {
        "exp_avg has values.* NaN, infinite": changed(numbers, "exp_avg", torch.full_like(variance, torch.nan)),
        "exp_avg_sq has values.* or negative": changed(numbers, "exp_avg_sq", variance - 1),
        "scales is missing": changed(codes, "scales", None),
        r"scales has shape \(1, 2\), and its blocks \(250, 2\)": changed(codes, "scales", scales[:1]),
        "exp_avg_sq is torch.bfloat16 with 8-bit codes": changed(codes, "exp_avg_sq", variance),
    }
    for message, saved in bad.items():
        with pytest.raises(ValueError, match=f"embedding.weight: {message}") as error:
            optimizer.load_state_dict(saved)
        assert "\n" not in str(error.value)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, codes["state"][number][key]) for key, value in state.items())
    session.close()


def test_eight_bit_codes_are_refused_where_moments_are_floats(tmp_path):
    ours, theirs = odd(), odd()
    other = in_memory(theirs)
    loop(theirs, other, batches(1))
    session, optimizer = begin(ours, tmp_path / "run")
    with pytest.raises(ValueError, match="8-bit codes in the loaded state, but float32 here: decode them"):
        optimizer.load_state_dict(other.state_dict())
    session.close()
