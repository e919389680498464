"""Cross-entropy without the full logits, against torch's over all of them."""

import pytest
import torch
import torch.nn.functional as F

from memascend.memory import tracking
from memascend.ops.cross_entropy import LogitTransform, chunked_linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = (3, 37), 16, 101
# The gradient of one token's logits takes 12 to 16 bytes per word: 16 tokens at a time, the last chunk smaller.
CHUNK_BYTES = 16 * VOCABULARY * 16


def operands(dtype, *, bias=True, ignored=9, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    labels = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    labels[0, :ignored] = -100
    return normal(*TOKENS, HIDDEN), normal(VOCABULARY, HIDDEN), normal(VOCABULARY) if bias else None, labels


def reference(hidden, weight, labels, bias, *, reduction="mean", transform=None, ignore_index=-100):
    logits = F.linear(hidden, weight, bias).float()
    if transform is not None:
        logits = transform(logits)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=ignore_index)


def loss_and_gradients(function, hidden, weight, bias, labels, loss_scale=1.0, **options):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = function(leaves[0], leaves[1], labels, leaves[2], **options)
    (loss * loss_scale).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)


def relative_difference(a, b):
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


@pytest.mark.parametrize("transform", [None, LogitTransform(softcap=3.0), LogitTransform(0.25, 2.0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fp32_agrees_with_torch(reduction, bias, transform):
    given = operands(torch.float32, bias=bias)
    options = {"reduction": reduction, "transform": transform}
    expected = loss_and_gradients(reference, *given, **options)
    found = loss_and_gradients(chunked_linear_cross_entropy, *given, chunk_bytes=CHUNK_BYTES, **options)
    for a, b in zip(found, expected):
        assert relative_difference(a, b) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_as_accurate_as_torch(dtype):
    hidden, weight, bias, labels = operands(dtype)
    truth = loss_and_gradients(reference, hidden.double(), weight.double(), bias.double(), labels)
    expected = loss_and_gradients(reference, hidden, weight, bias, labels)
    found = loss_and_gradients(chunked_linear_cross_entropy, hidden, weight, bias, labels, chunk_bytes=CHUNK_BYTES)
    assert found[0].dtype == torch.float32
    assert relative_difference(found[0], expected[0]) <= 1e-6
    for ours, theirs, exact in zip(found[1:], expected[1:], truth[1:]):
        assert ours.dtype == dtype
        # One more rounding to 16 bits is allowed, relative to the largest element.
        assert relative_difference(ours, exact) <= relative_difference(theirs, exact) + torch.finfo(dtype).eps


def test_fp16_gradients_of_a_scaled_loss_do_not_underflow():
    hidden, weight, bias, labels = operands(torch.float16)
    # nearly equal logits: softmax / tokens is below the smallest normal fp16 number
    hidden, weight = hidden / 64, weight / 64
    scale = 2.0**16
    truth = loss_and_gradients(reference, hidden.double(), weight.double(), bias.double(), labels, scale)
    found = loss_and_gradients(chunked_linear_cross_entropy, hidden, weight, bias, labels, scale)
    for ours, exact in zip(found[1:], truth[1:]):
        assert relative_difference(ours, exact) <= 4 * torch.finfo(torch.float16).eps


def test_chunks_of_any_size_give_the_same_loss():
    given = operands(torch.bfloat16)
    losses = {
        loss_and_gradients(chunked_linear_cross_entropy, *given, chunk_bytes=n)[0].item()
        for n in (1, CHUNK_BYTES // 16, CHUNK_BYTES, 1 << 30)
    }
    assert max(losses) - min(losses) <= 1e-6 * max(losses)


def test_ignored_labels_get_no_gradient_for_any_ignore_index():
    hidden, weight, bias, labels = operands(torch.float32)
    expected = loss_and_gradients(reference, hidden, weight, bias, labels)
    renamed = labels.masked_fill(labels == -100, 7 * VOCABULARY)
    found = loss_and_gradients(
        chunked_linear_cross_entropy, hidden, weight, bias, renamed, ignore_index=7 * VOCABULARY, chunk_bytes=1
    )
    assert found[1][0, :9].count_nonzero() == 0
    for a, b in zip(found, expected):
        assert relative_difference(a, b) <= 1e-6


def test_without_counted_labels_mean_is_nan_and_sum_zero():
    hidden, weight, bias, labels = operands(torch.float32)
    nothing = torch.full_like(labels, -100)
    assert chunked_linear_cross_entropy(hidden, weight, nothing, bias).isnan()
    assert reference(hidden, weight, nothing, bias).isnan()
    assert chunked_linear_cross_entropy(hidden, weight, nothing, bias, reduction="sum") == 0


def test_frozen_operands_get_no_gradient():
    hidden, weight, bias, labels = operands(torch.float32)
    hidden.requires_grad_()
    chunked_linear_cross_entropy(hidden, weight, labels, bias).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    weight.requires_grad_()
    chunked_linear_cross_entropy(hidden.detach(), weight, labels, bias).backward()
    assert weight.grad is not None


def test_autocast_computes_in_its_type_and_keeps_fp32_gradients():
    hidden, weight, bias, labels = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(reference, hidden, weight, bias, labels)
        found = loss_and_gradients(chunked_linear_cross_entropy, hidden, weight, bias, labels)
    assert relative_difference(found[0], expected[0]) <= 1e-6
    assert {t.dtype for t in found} == {torch.float32}


def test_full_logits_are_never_materialized():
    hidden, weight, labels = (
        torch.randn(512, 8),
        torch.randn(4096, 8, requires_grad=True),
        torch.randint(0, 4096, (512,)),
    )
    hidden.requires_grad_()
    chunk_bytes = 1 << 20  # all logits would take 8 MiB, twice
    tracking.install()
    try:
        peaks = []
        for function in (F.cross_entropy, chunked_linear_cross_entropy):
            before = sum(tracking.live_bytes().values())
            tracking.reset_peaks()
            if function is F.cross_entropy:
                function(F.linear(hidden, weight), labels).backward()
            else:
                function(hidden, weight, labels, chunk_bytes=chunk_bytes).backward()
            peaks.append(max(tracking.peak_bytes().values()) - before)
            hidden.grad = weight.grad = None
        tracking.events()
    finally:
        tracking.uninstall()
    assert peaks[0] >= 16 << 20
    assert peaks[1] <= chunk_bytes + (1 << 20)  # the gradients of hidden and weight are 144 KiB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "use 'mean' or 'sum'"),
        ({"labels": torch.zeros(3, 36, dtype=torch.long)}, "need \\(..., H\\), \\(V, H\\)"),
        ({"weight": torch.zeros(0)}, "must be gathered"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    hidden, weight, bias, labels = operands(torch.float32)
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        chunked_linear_cross_entropy(**given)


def test_a_label_outside_the_vocabulary_is_an_error():
    hidden, weight, bias, labels = operands(torch.float32)
    labels[1, 1] = VOCABULARY
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_linear_cross_entropy(hidden, weight, labels, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_results_agree_with_torch(dtype):
    given = [None if t is None else t.cuda() for t in operands(dtype)]
    expected = loss_and_gradients(reference, *given)
    found = loss_and_gradients(chunked_linear_cross_entropy, *given, chunk_bytes=CHUNK_BYTES)
    for a, b in zip(found, expected):
        assert relative_difference(a, b) <= (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
