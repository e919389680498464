"""Random numbers of stochastic rounding, computed as the papers describe them, independently of the code under test."""


def times(a: int, b: int) -> int:
    """Return the product in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1 (FIPS 197, 4.2)."""
    out = 0
    while b:
        out ^= a * (b & 1)
        a, b = (a << 1) ^ (0x11B * (a >> 7)), b >> 1
    return out


def s_box(value: int) -> int:
    """Return the S-box value: the multiplicative inverse, then the affine map (FIPS 197, 5.1.1)."""
    inverse = next((i for i in range(256) if times(value, i) == 1), 0)
    turned = [inverse << n | inverse >> (8 - n) for n in range(5)]
    return (turned[0] ^ turned[1] ^ turned[2] ^ turned[3] ^ turned[4] ^ 0x63) & 0xFF


S_BOX = [s_box(value) for value in range(256)]


def ars5(counter: tuple[int, int], key: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Run ARS-5 as Salmon et al. (SC'11) and FIPS 197 describe it.

    Returns the block, and the block after one more full round, as eight 16-bit numbers each.
    """
    mask = 2**64 - 1
    keys = [
        (((key[0] + r * 0x9E3779B97F4A7C15) & mask) | ((key[1] + r * 0xBB67AE8584CAA73B) & mask) << 64).to_bytes(
            16, "little"
        )
        for r in range(7)
    ]
    state = [a ^ b for a, b in zip((counter[0] | counter[1] << 64).to_bytes(16, "little"), keys[0])]
    out = []
    for round_number in range(1, 7):
        state = [S_BOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16)]
        if round_number != 5:  # the last round of ARS-5 has no MixColumns
            state = [
                times(state[i], 2)
                ^ times(state[i // 4 * 4 + (i + 1) % 4], 3)
                ^ state[i // 4 * 4 + (i + 2) % 4]
                ^ state[i // 4 * 4 + (i + 3) % 4]
                for i in range(16)
            ]
        state = [a ^ b for a, b in zip(state, keys[round_number])]
        out.append([int.from_bytes(bytes(state[i : i + 2]), "little") for i in range(0, 16, 2)])
    return out[4], out[5]


def words(element: int, step: int, seed: int) -> tuple[int, int, int]:
    """Return the 16-bit random words of an element's parameter, momentum and variance."""
    block, further = ars5((element // 8, step), (seed, 0))
    low, high = block[element % 8], further[element % 8]
    return low, low ^ high, high
