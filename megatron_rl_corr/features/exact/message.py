"""What a run says that ends because a token's log-prob is another one in training than at the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.ledger_verdict import TERMS, WORDS, verdict_line


def message(options: RunConfig, step: int, token: Mapping[str, Any], numbers: Mapping[str, float]) -> str:
    """Which token is apart first, with both values, where it was sampled, and the ledger's term.

    Args:
        options: of the run.
        step: from 1.
        token: as `ExactFeature` finds it.
        numbers: of the step, by their logged names.
    """
    kind = token["number_type"]
    found = (
        f"--rollout-expect-exact {options.expect_exact:g}: in step {step} "
        f"{numbers['exact/tokens_apart']:.0f} of {numbers['exact/tokens']:.0f} sampled tokens have another "
        f"log-prob in training than at the server, up to {numbers['exact/ulps_max']:g} ulps of {kind}; "
        "nothing was trained. The first is token "
        f"{token.get('token')} (id {token['token_id']}, position {token['position']}) of sample "
        f"{token['sample']} of replica {token['replica']}: training has {token['log_p_train']!r}, "
        f"{token.get('server') or 'the saved sample'} with weights {token.get('weight_version')} has "
        f"{token['log_q_server']!r}, {token['ulps']:g} ulps apart"
    )
    return f"{found}. {_ledger(numbers, options)}"


def _ledger(numbers: Mapping[str, float], options: RunConfig) -> str:
    """Where the ledger puts the difference; else what would tell."""
    if not numbers.get("ledger/tokens"):
        return (
            "--rollout-ledger-interval 1 --rollout-ledger-share 1 names the part that it comes from; docs: "
            "guides/exact.md has what must agree"
        )
    shares = {name: numbers[f"ledger/{name}/share"] for name in TERMS if f"ledger/{name}/share" in numbers}
    largest = max(shares, key=shares.__getitem__)
    return (
        f"Ledger: {round(100 * shares[largest])} % is {largest} ({WORDS[largest]}); "
        f"{verdict_line(numbers, urls=options.urls)}"
    )
