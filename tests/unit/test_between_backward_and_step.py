"""Between `backward()` and `step()` a loop sees the weights of the last completed step, or a refusal in one line."""

import pytest
import torch

from memascend.engine.errors import NotStreamable
from memascend.engine.options import EngineOptions
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop

STEP_FIRST = r"call optimizer\.step\(\) first"


def evaluate(of, ids):
    of.eval()
    with torch.no_grad():
        loss = of(ids).item()
    of.train()
    return loss


def evaluate_a_part(of, ids):
    """Evaluate as a loop that computes its own loss does: the root's forward is never called."""
    with torch.no_grad():
        return float(of.layers[0](of.embedding(ids), scale=torch.tensor(0.5)).sum())


READS = {
    "evaluation": lambda session, optimizer, of, ids: evaluate(of, ids),
    "evaluation of a part": lambda session, optimizer, of, ids: evaluate_a_part(of, ids),
    "state_dict": lambda session, optimizer, of, ids: of.state_dict(),
    "read_weights": lambda session, optimizer, of, ids: list(session.engine.read_weights()),
    "read_states": lambda session, optimizer, of, ids: session.engine.read_states("head.weight"),
    "optimizer.state_dict": lambda session, optimizer, of, ids: optimizer.state_dict(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_half_updated_model_refuses_reads_and_completes_its_step(tmp_path, read):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run")
    for number, ids in enumerate(data):
        ours(ids).backward()
        if number == 1:
            with pytest.raises(RuntimeError, match=STEP_FIRST):
                read(session, optimizer, ours, ids)
        optimizer.step()
        read(session, optimizer, ours, ids)
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize("options", [{"wait": True}, {"clip": 0.5}, {"accumulate": 2}], ids=str)
def test_reads_see_the_last_completed_step_while_gradients_wait(tmp_path, options):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", **options)
    passes = options.get("accumulate", 1)
    for _ in range(passes):
        ours(data[0]).backward()
    optimizer.step()
    before = evaluate(ours, data[1])
    weights = {name: values.clone() for name, values in ours.state_dict().items()}
    states = {name: values.clone() for name, values in session.engine.read_states("head.weight").items()}
    ours(data[1]).backward()
    assert evaluate(ours, data[1]) == before
    assert all(torch.equal(values, weights[name]) for name, values in ours.state_dict().items())
    assert all(torch.equal(values, states[name]) for name, values in session.engine.read_states("head.weight").items())
    assert optimizer.state_dict()["state"][0]["step"] == 1
    for _ in range(passes - 1):
        ours(data[1]).backward()
    optimizer.step()
    session.close()
    reference, other = begin(theirs, tmp_path / "other", **options)  # the reference, which is not inspected
    for ids in data[:2]:
        for _ in range(passes):
            theirs(ids).backward()
        other.step()
    again = model(seed=5)
    session, _ = begin(again, tmp_path / "run", resume=True, **options)
    expected = theirs.state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in again.state_dict().items())
    session.close(), reference.close()


def test_states_cannot_be_replaced_between_backward_and_step(tmp_path):
    ours, data = model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    loop(ours, optimizer, data[:1])
    saved = optimizer.state_dict()
    ours(data[1]).backward()
    with pytest.raises(RuntimeError, match="states cannot be replaced: " + STEP_FIRST):
        optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    session.close()


def test_interrupted_backward_leaves_the_last_completed_step_readable(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:1])

    def interrupt(_):
        raise KeyboardInterrupt

    ours.embedding.register_forward_hook(lambda _, inputs, output: output.register_hook(interrupt) and None)
    with pytest.raises(KeyboardInterrupt):
        ours(data[1]).backward()
    rescued = ours.state_dict()
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data[:1])
    assert all(torch.equal(rescued[name], values) for name, values in theirs.state_dict().items())
    session.close()


@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"accumulate": 2}], ids=str)
def test_unannounced_backward_pass_is_refused_before_a_step_completes(tmp_path, options):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", **options)
    passes = options.get("accumulate", 1)
    for _ in range(passes):
        ours(data[0]).backward()

    def one_more():
        ours(data[0]).backward()

    with pytest.raises(RuntimeError, match=r"accumulate="):
        one_more()
    assert session.steps == 0
    optimizer.zero_grad()
    for ids in data:
        for _ in range(passes):
            (ours(ids) / passes).backward()
        optimizer.step()
    reference, other = begin(theirs, tmp_path / "other", **options)
    for ids in data:
        for _ in range(passes):
            (theirs(ids) / passes).backward()
        other.step()
    assert session.steps == 2
    expected = theirs.state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in ours.state_dict().items())
    session.close(), reference.close()


@pytest.mark.parametrize("wait", [False, True])
def test_first_step_completes_after_a_refused_second_backward(tmp_path, wait):
    """The refused pass leaves nothing behind, not even the gradient with which it began."""
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", wait=wait)
    first, second = ours(data[0]), ours(data[1])
    first.backward()
    with pytest.raises(RuntimeError, match="backward pass 2 of a step that was set to have 1"):
        second.backward()
    del second
    optimizer.step()
    loop(ours, optimizer, data[2:])
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), [data[0], data[2]])
    assert_equal(session, theirs)
    session.close()


def test_engine_options_hold_unless_the_call_overrides_them(tmp_path):
    session, _ = begin(model(), tmp_path / "run", options=EngineOptions(accumulate=3, clip=0.5), wait=True)
    assert (session.engine.options.accumulate, session.engine.options.clip, session.engine.options.wait) == (
        3,
        0.5,
        True,
    )
    session.close()


def test_implicit_step_can_be_set_in_engine_options(tmp_path):
    ours, data = model(), batches(2)
    session, _ = begin(ours, tmp_path / "run", options=EngineOptions(implicit_step=True))
    for ids in data:
        ours(ids).backward()
    assert session.steps == 1
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"has no graph.*: call optimizer\.step\(\) first \("):
        ours(data[0])
    session.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["two graphs", "one graph twice"])
def test_accumulated_passes_may_overlap_or_share_a_graph(tmp_path, way, tied):
    """The second backward pass still has what it needs of the modules outside the blocks."""
    ours, theirs, data = model(tied=tied), model(tied=tied), batches(4)
    session, optimizer = begin(ours, tmp_path / "run", accumulate=2)
    for of, made in ((theirs, AdamW(theirs.parameters(), **SETTINGS)), (ours, optimizer)):
        for number in (0, 2):
            made.zero_grad()
            first = of(data[number])
            second = of(data[number + 1]) if way == "two graphs" else first
            first.backward(retain_graph=way != "two graphs")
            second.backward()
            made.step()
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_autograd_grad_pass_is_forgotten_with_its_step(tmp_path, end):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    torch.autograd.grad(ours(data[0]), [ours.norm.weight])
    getattr(optimizer, end)()
    loop(ours, optimizer, data)
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.close()


def test_unfreezing_after_optimizer_creation_is_refused_and_freezing_is_respected(tmp_path):
    ours, theirs, data = model(), model(), batches(3)
    for of in (ours, theirs):
        of.layers[1].requires_grad_(False)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:1])
    ours.layers[1].up.weight.requires_grad_(True)
    with pytest.raises(NotStreamable, match=r"layers\.1\.up\.weight was frozen when the optimizer was created"):
        ours(data[1])
    ours.layers[1].up.weight.requires_grad_(False)
    made = AdamW([p for p in theirs.parameters() if p.requires_grad], **SETTINGS)
    loop(theirs, made, data[:1])
    for of in (ours, theirs):
        of.layers[2].requires_grad_(False)
    loop(ours, optimizer, data[1:])
    loop(theirs, made, data[1:])
    assert_equal(session, theirs)
    session.close()


def test_graph_from_before_the_last_step_is_refused(tmp_path):
    """torch detects that the weights were changed in place."""
    ours, data = model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    first, second = ours(data[0]), ours(data[1])
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"graph from before the last optimizer\.step\(\)"):
        second.backward()
    loop(ours, optimizer, data[1:])
    theirs = model()
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.close()


def test_block_graph_from_before_the_last_step_is_refused(tmp_path):
    ours, data = model(), batches(1)
    session, optimizer = begin(ours, tmp_path / "run")
    kept = ours.layers[0](torch.ones(1, 2, 32), scale=torch.tensor(0.5)).sum()
    loop(ours, optimizer, data)
    with pytest.raises(RuntimeError, match=r"graph from before the last optimizer\.step\(\)"):
        kept.backward()
    session.close()


def test_graph_from_before_an_abandoned_step_is_refused(tmp_path):
    """Weights of modules outside the blocks are gone then; a zero_grad() before backward() gives nothing up."""
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    first, second = ours(data[0]), ours(data[1])
    first.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"graph from before the last optimizer\.step\(\) or zero_grad\(\)"):
        second.backward()
    other = AdamW(theirs.parameters(), **SETTINGS)
    for of, updates in ((ours, optimizer), (theirs, other)):
        for ids in data:
            loss = of(ids)
            updates.zero_grad()
            loss.backward()
            updates.step()
    assert_equal(session, theirs)
    session.close()


def test_settings_changed_after_updates_began_are_refused(tmp_path):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:1])
    ours(data[1]).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match=r"settings of .* were changed between backward\(\) and optimizer\.step\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loop(ours, optimizer, data[1:])
    other = AdamW(theirs.parameters(), **SETTINGS)
    loop(theirs, other, data[:1])
    other.param_groups[0]["lr"] *= 0.5
    loop(theirs, other, data[1:])
    assert_equal(session, theirs)
    session.close()


def test_settings_changed_before_step_apply_while_gradients_wait(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    other = AdamW(theirs.parameters(), **SETTINGS)
    for ids in data:
        for of, updates in ((ours, optimizer), (theirs, other)):
            updates.zero_grad()
            of(ids).backward()
            updates.param_groups[0]["lr"] *= 0.5
            updates.step()
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize("options", [{}, {"clip": 1e9}, {"accumulate": 2}], ids=str)
def test_inference_mode_evaluates_like_the_model_in_memory(tmp_path, options):
    ours, theirs, data = model(), model(), batches(1)
    session, _ = begin(ours, tmp_path / "run", **options)
    with torch.inference_mode():
        assert ours(data[0]).item() == theirs(data[0]).item()
    session.close()


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, x: torch.func.grad(loss)(x),
        lambda loss, x: torch.func.jvp(loss, (x,), (x,)),
        lambda loss, x: torch.func.vmap(loss)(x[None]),
    ],
    ids=["grad", "jvp", "vmap"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in its first jvp
def test_functional_transforms_are_refused_and_leave_the_model_unchanged(tmp_path, transform):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    scale = torch.ones(())
    with pytest.raises(NotStreamable, match=r"^torch\.func \(grad, vjp, jvp, vmap and the like\) needs copies"):
        transform(lambda factor: ours(data[0]) * factor, scale)
    assert loop(ours, optimizer, data) == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    session.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, weight: torch.autograd.grad(loss, weight),
        lambda loss, weight: loss.backward(inputs=[weight]),
    ],
    ids=["grad", "backward"],
)
def test_gradient_of_one_parameter_is_refused_with_an_alternative(tmp_path, ask):
    ours, data = model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    with pytest.raises(NotStreamable, match=r"streamed parameter \(layers\.0\..*\): call loss\.backward\(\)"):
        ask(ours(data[0]), next(ours.layers[0].parameters()))
    optimizer.zero_grad()
    loop(ours, optimizer, data)
    session.close()


@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
def test_activation_gradient_in_the_last_pass_ignores_accumulated_gradients(tmp_path, arm):
    """GradNorm does this, over the graph of the loss that the pass then goes through."""
    ours, theirs, data = model(), model(), batches(4)
    session, optimizer = begin(ours, tmp_path / "run", accumulate=2, options=EngineOptions(arm=arm))
    other = AdamW(theirs.parameters(), **SETTINGS)
    for of, updates in ((ours, optimizer), (theirs, other)):
        for number, ids in enumerate(data):
            kept = []
            hook = of.layers[0].register_forward_hook(lambda _, __, result, kept=kept: kept.append(result))
            loss = of(ids)
            hook.remove()
            (found,) = torch.autograd.grad(loss, kept, retain_graph=True)
            (loss * (1 + found.detach().norm())).backward()
            if number % 2:
                updates.step()
                updates.zero_grad()
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize("options", [{}, {"wait": True}, {"options": EngineOptions(zero_missing=True)}], ids=str)
def test_gradient_of_activations_alone_does_not_count_as_pass(tmp_path, options):
    """Saliency maps and adversarial examples need this."""
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", **options)
    other = AdamW(theirs.parameters(), **SETTINGS)
    for of, updates in ((ours, optimizer), (theirs, other)):
        for ids in data:
            updates.zero_grad()
            kept = []
            hook = of.layers[0].register_forward_hook(lambda _, __, result, kept=kept: kept.append(result))
            loss = of(ids)
            hook.remove()
            (found,) = torch.autograd.grad(loss, kept)
            of.last = found
            (of(ids) * (1 + found.square().sum())).backward()
            updates.step()
    assert torch.equal(ours.last, theirs.last)
    assert_equal(session, theirs)
    session.close()
