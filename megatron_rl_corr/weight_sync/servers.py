"""The rollout servers as a weight update sees them: begin, send buckets, end, resume; each call waits."""

from __future__ import annotations

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.update_group import UpdateGroup


class WeightServers:
    """Blocking weight updates of all servers of a client; a rank that never sends makes no group."""

    def __init__(self, client: RolloutClient, loop: LoopThread, *, backend: str, pause_mode: str = "retract"):
        self._client, self._loop = client, loop
        self._backend, self._pause_mode = backend, pause_mode
        self._group: UpdateGroup | None = None

    def begin(self) -> None:
        """Stop sampling and open the update session (SGLang <= 0.5.20 has none and needs none)."""
        self._loop.call(self._client.pause_generation(self._pause_mode))
        try:
            self._loop.call(self._client.begin_weight_update())
        except RolloutServerError as error:
            # A trainer that was killed in the middle of an update left its session open: nobody closes it.
            if error.status != 400 or "already open" not in error.detail:
                raise
            self._loop.call(self._client.end_weight_update())
            self._loop.call(self._client.begin_weight_update())

    def send(self, bucket: list[NamedTensor]) -> None:
        """Broadcast one bucket to all servers; the group is made at the first one."""
        if self._group is None:
            self._group = UpdateGroup(self._client, self._loop, backend=self._backend)
        self._group.broadcast(bucket)

    def end(self, version: str) -> None:
        """Close the session, name the weights, check every server's answer, drop prefixes of old weights."""
        self._loop.call(self._client.end_weight_update())
        self._loop.call(self._client.update_weight_version(version))
        answers = self._loop.call(self._client.model_info())
        for url, answer in zip(self._client.base_urls, answers, strict=True):
            if str(answer.get("weight_version")) != version:
                raise RolloutProtocolError(
                    url, "/model_info",
                    f"weight_version is {answer.get('weight_version')!r} after version {version!r} was "
                    "pushed; does another trainer push to this server?",
                )
        self._loop.call(self._client.flush_cache())

    def resume(self) -> None:
        """Go on sampling."""
        self._loop.call(self._client.continue_generation())

    def abandon(self) -> None:
        """After a failure in the middle: close the session and go on sampling, whatever of it is possible."""
        try:
            self._loop.call(self._client.end_weight_update())
        finally:
            self.resume()

    def close(self) -> None:
        """Take this process's broadcast group off the servers, if it made one."""
        if self._group is not None:
            self._loop.call(self._client.destroy_weights_update_group(self._group.name))
            self._group = None
