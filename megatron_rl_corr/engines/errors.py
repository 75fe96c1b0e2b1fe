"""Errors between this process and a rollout server; each names the server, and what to do."""

from collections.abc import Sequence
from copy import copy

from megatron_rl_corr.engines.secrets import for_message, longest_secret, redacted

BODY_START = 500  # characters of a response shown in a message
VALUE_START, MESSAGE_START = 200, 2000  # and of one of its fields, and of what a server says of a failure
GATEWAY_FAILURES = (502, 503, 504)
"""HTTP statuses of what stands before a server, or of one that is not ready; an engine
refuses with others.
"""


class RolloutError(RuntimeError):
    """A rollout server failed or broke its protocol. Attributes: url, endpoint, detail.

    Neither the message nor the detail has a key in it, whatever a server has sent back.
    """

    def __init__(self, url: str, endpoint: str, detail: str, message: str):
        super().__init__(for_message(message))
        self.url, self.endpoint, self.detail = url, endpoint, for_message(detail)


class RolloutServerError(RolloutError):
    """A server did not answer, or answered with a failure.

    Attributes:
        status: of HTTP; None without an answer.
        method: of HTTP.
        remedy: what to do, as the server's engine knows it; "" where it does not.
        timed_out: it was waited for as long as it may be, and its connection did not break.
    """

    def __init__(
        self,
        url: str,
        endpoint: str,
        status: int | None,
        detail: str,
        *,
        method: str = "POST",
        remedy: str = "",
        timed_out: bool = False,
    ):
        request = f"{method} {endpoint}"
        if status is None:
            message = f"rollout server {url} did not answer {request}: {detail}"
            remedy = remedy or _silence_remedy(detail)
        else:
            message = (
                f"rollout server {url} answered {request} with HTTP {status}: {detail or '(empty body)'}"
            )
        super().__init__(url, endpoint, detail, f"{message}; {remedy}" if remedy else message)
        self.status, self.method, self.remedy, self.timed_out = status, method, remedy, timed_out

    def __reduce__(self):
        named = self.method, self.remedy, self.timed_out
        return _server_error, (self.url, self.endpoint, self.status, self.detail, *named)


class PushTooLong(RolloutError):
    """A push of weights was not over in its time, and no server is known to be stuck.

    url, endpoint: what was to be asked next, or was not answered yet.
    """

    def __init__(self, url: str, endpoint: str, limit_s: float):
        detail = f"the push was not over within `push_timeout_s` {limit_s:g} s, and {endpoint} was due next"
        remedy = "are the servers, or the way to them, slow? give a larger `push_timeout_s`"
        super().__init__(url, endpoint, detail, f"rollout server {url}: {detail}; {remedy}")
        self.limit_s = limit_s

    def __reduce__(self):
        return PushTooLong, (self.url, self.endpoint, self.limit_s)


class IncompletePush(RolloutError):
    """A weight update leaves out a parameter of the servers, or brings one that they lack;
    `detail` says which.

    It names no server: the trainer finds it out by itself.
    """

    def __init__(self, detail: str):
        super().__init__("", "", detail, f"the servers would not have the trained weights: {detail}")

    def __reduce__(self):
        return IncompletePush, (self.detail,)


class RolloutProtocolError(RolloutError):
    """A server's answer contradicts itself or the request: using it would train on the wrong tokens."""

    def __init__(self, url: str, endpoint: str, detail: str):
        message = f"rollout server {url} broke the protocol of {endpoint}: {detail}"
        super().__init__(url, endpoint, detail, message)

    def __reduce__(self):
        return RolloutProtocolError, (self.url, self.endpoint, self.detail)


class UnreadableAnswer(RolloutProtocolError):
    """What came is no answer to the request, as a proxy's page is none: whether the server did
    it is not known.
    """

    def __reduce__(self):
        return UnreadableAnswer, (self.url, self.endpoint, self.detail)


def kept[E: RolloutError](error: E) -> E:
    """The same error, to keep it for longer than it is handled: without the frames that it went through,
    which hold what was sent, as a bucket of weights.
    """
    return copy(error)


def may_be_gone(error: RolloutError) -> bool:
    """True if the server may be down: no answer, HTTP 5xx, or an unparsable body."""
    if isinstance(error, RolloutServerError):
        return error.status is None or error.status >= 500
    return isinstance(error, RolloutProtocolError)


def may_pass(error: BaseException) -> bool:
    """True if the same request may succeed next time: no answer, a gateway's failure, or what is no answer.

    False where a server has understood the request: it would refuse it again.
    """
    if isinstance(error, RolloutServerError):
        return error.status is None or error.status in GATEWAY_FAILURES
    return isinstance(error, UnreadableAnswer)


def is_refusal(error: RolloutServerError) -> bool:
    """True if the server itself has refused, and done nothing: HTTP 4xx, but for 408, a gateway's
    word for a timeout.

    HTTP 5xx may come from a gateway for a request that the server has carried out, or from a
    server that began it.
    """
    return error.status is not None and 400 <= error.status < 500 and error.status != 408


class StaleWeightsError(RolloutError):
    """A server's weights are not those that the trainer sent last. Attributes: version, expected."""

    def __init__(self, url: str, endpoint: str, version: str, expected: str):
        detail = f"its weights are version {version!r}, the trainer's are {expected!r}"
        message = (
            f"rollout server {url} is not sampled from: {detail}; it is taken back once it has them. Was it "
            "restarted, or does another trainer push to it?"
        )
        super().__init__(url, endpoint, detail, message)
        self.version, self.expected = version, expected

    def __reduce__(self):
        return StaleWeightsError, (self.url, self.endpoint, self.version, self.expected)


class SampleFailure(RolloutError):
    """One sample failed for good; no other sample and no server is concerned.

    cause: one short word, to count failures by: `refused` (the server refused the request, HTTP 4xx),
    `retries` (every server that was asked failed), `protocol` (an answer that can't be used). message:
    what happened, for the user. `__cause__`: the error of the server, if one failed.
    """

    def __init__(self, cause: str, message: str, *, url: str = "", endpoint: str = ""):
        super().__init__(url, endpoint, message, message)
        self.cause = cause

    def __reduce__(self):
        return _sample_failure, (self.cause, self.detail, self.url, self.endpoint)


class TooManyFailures(RolloutError):
    """Samples fail for good more often than the user allows; the message says why they did."""

    def __init__(self, message: str):
        super().__init__("", "", message, message)

    def __reduce__(self):
        return TooManyFailures, (self.detail,)


class GroupsFilteredOut(RolloutError):
    """So few groups pass the filter that a step is not complete within its bound; the message
    says what to do.
    """

    def __init__(self, message: str):
        super().__init__("", "", message, message)

    def __reduce__(self):
        return GroupsFilteredOut, (self.detail,)


class RolloutOutage(RolloutError):
    """No server is left to sample from.

    Attributes:
        causes: for each server, why it was left out, and why it was not taken back (None: it was
            not asked again); none where there was no server.
    """

    def __init__(self, causes: Sequence[tuple[RolloutError, RolloutError | None]]):
        reasons = [
            str(cause) if refused is None else f"{cause}; asked again: {refused.detail or refused}"
            for cause, refused in causes
        ]
        # One line, so that a log filtered by its first words keeps the causes.
        message = f"none of {len(reasons)} rollout servers is left to sample from: " + "; ".join(reasons)
        if not causes:
            message = "there was no rollout server to sample from for too long"
        urls = ", ".join(cause.url for cause, _ in causes)
        super().__init__(urls, causes[0][0].endpoint if causes else "/", "; ".join(reasons), message)
        self.causes = tuple(causes)

    def __reduce__(self):
        return RolloutOutage, (self.causes,)


def body_start(body: bytes) -> str:
    """The first BODY_START characters of a response body, on one line and without keys."""
    start = body[: 5 * BODY_START + longest_secret()].decode("utf-8", "replace")
    text = " ".join(_first(start, 4 * BODY_START).split())
    return text if len(text) <= BODY_START else text[:BODY_START] + " ..."


def shown(value: object, characters: int = VALUE_START) -> str:
    """What a field holds, its first characters, without keys."""
    text = _first(value if isinstance(value, str) else repr(value), characters + 1)
    return text if len(text) <= characters else text[:characters] + " ..."


def _first(text: str, count: int) -> str:
    """About its first characters, without keys, nor the first part of one where it is cut."""
    margin = longest_secret()
    if len(text) <= count + margin:
        return redacted(text)
    found = redacted(text[: count + margin])
    return found[: len(found) - margin]


def _sample_failure(cause, message, url, endpoint):
    return SampleFailure(cause, message, url=url, endpoint=endpoint)


def _server_error(url, endpoint, status, detail, method, remedy, timed_out):
    return RolloutServerError(
        url, endpoint, status, detail, method=method, remedy=remedy, timed_out=timed_out
    )


def _silence_remedy(detail: str) -> str:
    if "made no progress" in detail:
        return "is it stuck? see its log, or give the client a larger read_timeout_s"
    if "timed out" in detail:
        return "is it paused, overloaded or stuck? see its log, or give the client a larger timeout_s"
    return "is the server still running? see its log"
