"""The seed that a vLLM server is sent for a seed of 64 bits."""

import hashlib

_BITS = 31


def server_seed(seed: int) -> int:
    """A hash of `seed` in [0, 2**31).

    vLLM 0.32 takes -1 for no seed at all, and torch's generator on the CPU keeps the low 32 bits alone: 1 and
    2**32 + 1 sample the same response (measured). A hash of all bits is neither.

    Args:
        seed: in [-2**63, 2**63).
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (1 << _BITS)
