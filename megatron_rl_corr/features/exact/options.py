"""The flag of the comparison in every bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, option
from megatron_rl_corr.config.problems import Refusal


@dataclass(frozen=True, kw_only=True)
class ExactConfig(Options):
    """Exactness: a run whose log-probs are the servers' own, with a certificate."""

    expect_exact: Annotated[float | None, Between(0, finite=True)] = option(None, metavar="ULPS")
    """End the run before its update where a sampled token's log-prob in training is further from the
    server's than ULPS units in the last place of the server's number type, 0: where it is another number.
    The first such token is named, and a run that holds leaves exact.json in `log_dir`.
    """

    def check_expect_exact(self) -> None:
        """ValueError for what makes the two sides differ by design, or leaves the certificate no place."""
        if self.expect_exact is None:
            return
        refused = {
            f"`max_lag` {self.max_lag}: what earlier weights sampled has another log-prob by design; use 0": (
                self.max_lag > 0 and self.replay is None
            ),
            f"`push_rounding` {self.push_rounding}: servers get other weights than are trained; use none": (
                self.push_rounding != "none"
            ),
        }
        given = [text for text, is_given in refused.items() if is_given]
        if self.log_dir is None:
            given.append("no `log_dir`: the certificate is written there; name a folder")
        if given:
            raise Refusal(f"`expect_exact` {self.expect_exact:g} with {text}" for text in given)


OPTIONS = ExactConfig
