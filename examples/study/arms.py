"""The arms of the study: the same run under each correction, and a twin without a mismatch."""

from dataclasses import dataclass

BOUND = 2.0
"""Largest weight in every arm that has weights; masks keep [1 / BOUND, BOUND]."""
NOTHING = ("--rollout-rs", "token_k3", "--rollout-rs-threshold", "1e9")
"""A rule that keeps every token: log-ratios are clamped at 20, and e^20 is below 1e9. The launcher refuses
lag without a correction, and here that is the experiment.
"""


@dataclass(frozen=True)
class Arm:
    """One correction. Example: Arm("token_truncate", "a token weighs min(rho, 2)",
    ("--rollout-is", "token")).
    """

    name: str
    text: str
    """What it does to the gradient, for the table."""
    flags: tuple = ()
    """Of the launcher."""
    is_twin: bool = False
    """Servers in float32, and neither rounding nor lag."""


def _weights(level, mode):
    bounds = f"{1 / BOUND}_{BOUND}" if mode == "mask" else BOUND
    return ("--rollout-is", level, "--rollout-is-mode", mode, "--rollout-is-threshold", bounds)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "nothing", NOTHING),
        Arm("token_truncate", "each token weighs min(rho, 2)", _weights("token", "truncate")),
        Arm("token_mask", "a token weighs rho, and 0 outside of [0.5, 2]", _weights("token", "mask")),
        Arm(
            "sequence_truncate",
            "each response weighs min(product of rho, 2)",
            _weights("sequence", "truncate"),
        ),
        Arm(
            "sequence_mask",
            "a response weighs its product of rho, and 0 outside of [0.5, 2]",
            _weights("sequence", "mask"),
        ),
        Arm(
            "geo_rs_token_tis",
            "token_truncate, without responses whose geometric mean rho is outside of [0.9, 1.1]",
            (
                *_weights("token", "truncate"),
                "--rollout-rs",
                "seq_mean_ratio",
                "--rollout-rs-threshold",
                "0.9_1.1",
            ),
        ),
        Arm(
            "centering",
            "no weights; the drift that the mismatch gives the gradient is taken away, with 16 ids",
            ("--rollout-score-centering", 16),
        ),
        Arm(
            "auto",
            "token or sequence weights, as each batch's effective sample size asks for",
            ("--rollout-correction", "auto"),
        ),
        # With this learning rate a step moves routers so far that routes of a version ago would be refused.
        Arm(
            "r3",
            "trains through the servers' experts, without weights",
            (*NOTHING, "--router-replay", "R3", "--router-replay-min-agreement", -1),
        ),
        Arm(
            "twin",
            "nothing, and there is no mismatch: float32 servers, no rounding, no lag",
            NOTHING,
            is_twin=True,
        ),
    )
}
QUICK = ("none", "token_truncate", "geo_rs_token_tis", "twin")
COLORS = dict(
    zip(
        ARMS,
        (
            "#000000",
            "#0072B2",
            "#56B4E9",
            "#D55E00",
            "#E69F00",
            "#009E73",
            "#F0E442",
            "#332288",
            "#CC79A7",
            "#999999",
        ),
        strict=True,
    )
)
