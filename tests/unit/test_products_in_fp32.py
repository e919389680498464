"""Products of 16-bit matrices in fp32: their values and gradients, and when a training takes them."""

import pytest
import torch
from torch.nn import functional

from memascend.ops import half_linear
from memascend.ops.half_linear import (
    choose_products,
    computed_in_fp32,
    product_in_fp32,
    products,
    products_in_fp32,
)

CPU = torch.device("cpu")


def outcome(dtype, *, bias=True, frozen=(), out=600):
    torch.manual_seed(0)
    values = {"x": torch.randn(2, 5, 48), "weight": torch.randn(out, 48), "bias": torch.randn(out)}
    values = {name: tensor.to(dtype).requires_grad_(name not in frozen) for name, tensor in values.items()}
    y = functional.linear(values["x"], values["weight"], values["bias"] if bias else None)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))
    return y.detach(), {name: tensor.grad for name, tensor in values.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("out", [1, 256, 600])
def test_values_and_gradients_match_exact_products_rounded_once(dtype, out):
    torch.manual_seed(0)
    exact = {"x": torch.randn(2, 5, 48), "weight": torch.randn(out, 48), "bias": torch.randn(out)}
    exact = {name: tensor.to(dtype).double().requires_grad_() for name, tensor in exact.items()}
    y = functional.linear(exact["x"], exact["weight"], exact["bias"])
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype).double())
    undo = products_in_fp32(dtype)
    try:
        found, gradients = outcome(dtype, out=out)
    finally:
        undo()
    eps = torch.finfo(dtype).eps
    assert torch.allclose(found.double(), y.detach(), rtol=eps, atol=1e-4)
    for name, tensor in exact.items():
        assert gradients[name].dtype == dtype
        assert torch.allclose(gradients[name].double(), tensor.grad, rtol=eps, atol=1e-4), name


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("x",), ("x", "bias")], ids=str)
def test_frozen_tensors_get_no_gradient_and_others_keep_theirs(frozen):
    undo = products_in_fp32(torch.bfloat16)
    try:
        _, everything = outcome(torch.bfloat16)
        _, found = outcome(torch.bfloat16, frozen=frozen)
        _, without_bias = outcome(torch.bfloat16, bias=False)
    finally:
        undo()
    for name, gradient in everything.items():
        assert (found[name] is None) if name in frozen else torch.equal(found[name], gradient)
    assert without_bias["bias"] is None


def test_auto_uses_fp32_where_the_cpu_lacks_bf16(monkeypatch):
    for native, expected in ((True, "native"), (False, "fp32")):
        monkeypatch.setattr(half_linear, "bf16_is_native", lambda native=native: native)
        assert products(torch.bfloat16, "auto", CPU) == expected
        assert products(torch.bfloat16, "native", CPU) == "native"
        assert products(torch.bfloat16, "fp32", CPU) == "fp32"
        assert products(torch.float16, "native", CPU) == "fp32"
        assert products(torch.float32, "fp32", CPU) == "native"
        assert products(torch.bfloat16, "fp32", torch.device("cuda")) == "native"


def test_chosen_products_can_be_undone():
    stock = functional.linear
    undo = choose_products(torch.bfloat16, "fp32", CPU)
    assert functional.linear is not stock
    undo()
    assert functional.linear is stock
    choose_products(torch.bfloat16, "native", CPU)()
    assert functional.linear is stock


def test_computed_in_fp32_follows_the_chosen_products():
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    assert not computed_in_fp32(tensor)
    assert computed_in_fp32(tensor.half())
    undo = products_in_fp32(torch.bfloat16)
    assert computed_in_fp32(tensor)
    undo()
    assert not computed_in_fp32(tensor)


@pytest.mark.parametrize("rows", [1, 256, 700])
def test_sliced_product_matches_the_whole_product(rows):
    torch.manual_seed(0)
    a, b = torch.randn(5, rows).bfloat16(), torch.randn(rows, 33).bfloat16()
    found = product_in_fp32(a, b)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
    assert torch.allclose(product_in_fp32(b.t(), a.t()), found.t(), rtol=1e-5, atol=1e-4)
