"""Whose fault a failed request is: its server's, the sample's, or that of every request."""

from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    SampleFailure,
    StaleWeightsError,
)

FAILS_EVERY_REQUEST = (301, 302, 303, 307, 308, 401, 403, 404, 405)
"""HTTP statuses of a wrong key or address: every other request would get them too."""


def failure_of_sample(error: RolloutError) -> SampleFailure | None:
    """The error as a failure of this sample alone; None where every other sample would fail the same way."""
    if isinstance(error, RolloutProtocolError):
        cause = "protocol"
    elif may_retry(error):
        cause = "retries"
    elif isinstance(error, RolloutServerError) and error.status not in FAILS_EVERY_REQUEST:
        cause = "refused"
    else:
        return None
    return SampleFailure(cause, str(error), url=error.url, endpoint=error.endpoint)


def may_retry(error: RolloutError) -> bool:
    """True if another server, or this one later, may answer the same request well.

    True for no answer, for HTTP 429 and 5xx, for an answer that can't be used, and for weights that are
    not the trainer's. Other statuses refuse the request itself, unless another server takes it.
    """
    if isinstance(error, (StaleWeightsError, RolloutProtocolError)):
        return True
    return isinstance(error, RolloutServerError) and (
        error.status is None or error.status == 429 or error.status >= 500
    )
