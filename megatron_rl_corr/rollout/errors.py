"""What went wrong between this process and a rollout server: named exceptions that say which server."""

BODY_START = 500  # characters of a response shown in a message


class RolloutError(RuntimeError):
    """A rollout server failed or broke its protocol. Attributes: url, endpoint, detail."""

    def __init__(self, url: str, endpoint: str, detail: str, message: str):
        super().__init__(message)
        self.url, self.endpoint, self.detail = url, endpoint, detail


class RolloutServerError(RolloutError):
    """A server did not answer, or answered with a failure. `status`: of HTTP, None without an answer."""

    def __init__(self, url: str, endpoint: str, status: int | None, detail: str, *, method: str = "POST"):
        asked = f"{method} {endpoint}"
        if status is None:
            message = f"SGLang server {url} did not answer {asked}: {detail}"
        else:
            message = f"SGLang server {url} answered {asked} with HTTP {status}: {detail or '(empty body)'}"
        remedy = _remedy(endpoint, status, detail)
        super().__init__(url, endpoint, detail, f"{message}; {remedy}" if remedy else message)
        self.status, self.method = status, method

    def __reduce__(self):
        return _server_error, (self.url, self.endpoint, self.status, self.detail, self.method)


class RolloutProtocolError(RolloutError):
    """A server's answer contradicts itself or the request: using it would train on the wrong tokens."""

    def __init__(self, url: str, endpoint: str, detail: str):
        message = f"SGLang server {url} broke the protocol of {endpoint}: {detail}"
        super().__init__(url, endpoint, detail, message)

    def __reduce__(self):
        return RolloutProtocolError, (self.url, self.endpoint, self.detail)


def body_start(body: bytes) -> str:
    """The first BODY_START characters of a response body, on one line."""
    text = " ".join(body[: 4 * BODY_START].decode("utf-8", "replace").split())
    return text if len(text) <= BODY_START else text[:BODY_START] + " ..."


def _server_error(url, endpoint, status, detail, method):
    return RolloutServerError(url, endpoint, status, detail, method=method)


def _remedy(endpoint: str, status: int | None, detail: str) -> str:
    if status is None and "timed out" in detail:
        return "is it paused, overloaded or stuck? see its log, or give the client a larger timeout_s"
    if status is None:
        return "is the server still running? see its log"
    if status in (401, 403):
        return "give the client the server's --admin-api-key, or its --api-key where it has no other"
    if status == 404:
        return "is this the address of an SGLang server, and is its version supported?"
    if status == 503 and endpoint == "/health":
        return "it is starting, paused or stuck; see its log"
    return ""
