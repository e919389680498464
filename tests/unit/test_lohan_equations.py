"""LoHan's equations against the numbers of its own text: sizes, seconds, the three cases, Algorithm 1."""

import pytest

from memascend.baselines.lohan.equations import (
    GIB,
    Net,
    Rates,
    algorithm_1,
    backward_terms,
    best,
    case,
    forward_terms,
    iteration_s,
    on_ssd,
    policy_bytes,
    prefixes,
)

RATES = Rates(gpu=145.8e12, link=21e9, read=21.8e9, write=18.4e9)


def net(batch=32, layers=40, hidden=5120):
    return Net(layers=layers, hidden=hidden, batch=batch)


def test_sizes_of_the_13b_model_match_section_iii():
    n = net()
    assert n.all_activations / GIB == pytest.approx(212.5)  # printed 213
    assert n.between_blocks / GIB == pytest.approx(12.5)
    assert 14 * n.parameters / 1e9 == pytest.approx(182, rel=0.02)
    assert n.forward_flops / RATES.gpu == pytest.approx(5.96, rel=0.01)


def test_recomputed_flops_fall_to_zero_and_are_convex():
    n = net()
    whole = [n.recomputed_flops(swapped) for swapped in prefixes(n)]
    assert whole[0] == n.block_flops
    assert whole[-1] == pytest.approx(0, abs=1e-3 * n.block_flops)
    slopes = [n.slope(swapped) for swapped in prefixes(n)]
    assert slopes == sorted(slopes)
    assert n.operators()[0].name == "fc2"


@pytest.mark.parametrize(("batch", "wanted"), [(24, 1), (36, 3), (48, 3), (60, 3)])
@pytest.mark.parametrize("host_gib", [0, 400])
def test_cases_of_figure_9b_hold_for_any_memory_size(batch, wanted, host_gib):
    rates = Rates(gpu=145.8e12, link=21e9, read=21.8e9, write=18.4e9, host_bytes=host_gib * GIB)
    assert case(net(batch), rates) == wanted


def test_algorithm_1_finds_the_prefix_with_the_shortest_iteration():
    """Erratum L17: at batch 32 the SSDs bound the backward pass, so swapping more than A_interBlock gains nothing."""
    assert algorithm_1(net(32), RATES) == best(net(32), RATES) == net(32).between_blocks
    many = net(48)
    assert iteration_s(many, RATES, algorithm_1(many, RATES)) == min(
        iteration_s(many, RATES, a) for a in prefixes(many)
    )


def test_the_share_on_ssds_is_never_negative():
    """Erratum L16: as printed, spare memory would shorten the forward pass."""
    assert on_ssd(10.0, 50.0) == 0.0
    n, ample = net(), Rates(gpu=1e30, link=1e30, read=21.8e9, write=18.4e9, host_bytes=400 * GIB)
    assert forward_terms(n, ample, n.between_blocks)["SSD"] == 2 * n.parameters / 21.8e9


def test_optimizer_moves_14_bytes_per_parameter_each_way_in_backward():
    n = net()
    assert backward_terms(n, RATES, 0.0)["SSD"] == pytest.approx(14 * n.parameters * (1 / 21.8e9 + 1 / 18.4e9))


def test_memory_policies_fail_without_memory_and_g10_swaps_everything():
    n = net(24, 80, 8192)
    assert policy_bytes("LoHan+G10", n, RATES) == n.all_activations
    assert [policy_bytes(name, n, RATES) for name in ("LoHan+ZeRO", "LoHan+Cap", "LoHan+CM")] == [None] * 3
    with pytest.raises(ValueError, match="unknown policy 'LoHan'"):
        policy_bytes("LoHan", n, RATES)
