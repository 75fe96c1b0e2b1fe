"""pass@k: the chance that one of k samples of a prompt passes, estimated from more samples than k."""

import math


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of the choices of k out of n samples that hold one that passed.

    Unbiased, unlike 1 - (1 - c / n)^k. Chen et al. 2021, "Evaluating large language models trained
    on code", eq. 1.

    Example: 0.5 for 4 samples of which 1 passed, and k 2: 3 of the 6 pairs have it.

    Args:
        samples: n, at least k.
        passed: c of them passed.
        k: at least 1.

    Raises:
        ValueError: the numbers do not fit together.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {passed} of which passed, is not defined")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def powers_up_to(samples: int) -> list[int]:
    """The k that are reported for so many samples: 1, 2, 4 and so on, and the number itself."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]
