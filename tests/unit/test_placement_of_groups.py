"""How many sub-groups each path gets: Eq. 1 of MLP-Offload, and the placement that balances times (erratum M2)."""

from __future__ import annotations

import random

import pytest

from memascend.storage.placement import Rates, arrange, counts, update_seconds

NVME, PFS = Rates(6.9e9, 5.3e9), Rates(3.6e9, 3.6e9)  # Table 1, Testbed-1


def test_as_published_counts_follow_equation_1_with_adjusted_sum():
    assert counts(100, "as_published", [NVME, PFS]) in ([60, 40], [59, 41])  # ceilings of 59.55 and 40.45
    assert counts(4, "as_published", [NVME, PFS]) == [2, 2]
    assert counts(97, "as_published", [NVME, NVME]) in ([48, 49], [49, 48])


def test_balanced_placement_minimizes_the_time_of_the_slowest_path():
    assert counts(100, "balanced", [NVME, PFS]) == [63, 37]  # 1.67 : 1
    for seed in range(20):
        chance = random.Random(seed)
        rates = [Rates(chance.uniform(1, 9), chance.uniform(1, 9)) for _ in range(2)]
        groups = chance.randrange(1, 30)
        chosen = update_seconds([float(n) for n in counts(groups, "balanced", rates)], rates)
        best = min(update_seconds([float(n), float(groups - n)], rates) for n in range(groups + 1))
        assert chosen == pytest.approx(best)


@pytest.mark.parametrize("placement", ["balanced", "as_published", [2.0, 1.0, 1.0]])
def test_the_counts_add_up_for_any_number_of_groups(placement):
    for groups in range(40):
        found = counts(groups, placement, [Rates(7, 5), Rates(3, 4), Rates(1, 9)])
        assert sum(found) == groups
        assert min(found) >= 0


@pytest.mark.parametrize("placement", ["balanced", "as_published"])
def test_every_part_of_a_pass_uses_all_paths(placement):
    places = list(arrange({str(n): 100 for n in range(60)}, placement, [Rates(2, 2), Rates(1, 1)]).values())
    assert places.count(0) == 40
    for begin in range(0, 60, 6):
        assert places[begin : begin + 6].count(0) == 4


def test_groups_of_unequal_sizes_are_balanced_by_bytes():
    sizes = {"embedding": 600} | {str(n): 100 for n in range(6)}
    places = arrange(sizes, "balanced", [Rates(1, 1), Rates(1, 1)])
    load = [sum(sizes[g] for g, p in places.items() if p == path) for path in (0, 1)]
    assert load == [600, 600]


def test_invalid_placements_and_rates_are_refused():
    with pytest.raises(ValueError, match="placement 'fast' is unknown"):
        counts(4, "fast", [NVME, PFS])
    with pytest.raises(ValueError, match="a share for each of 2 paths"):
        counts(4, [1.0], [NVME, PFS])
    with pytest.raises(ValueError, match="are positive"):
        Rates(0, 1)
