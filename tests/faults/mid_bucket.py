"""Strikes in the middle of a bucket: servers have some of its tensors, and wait for the next."""

import time


class Interrupted:
    """Stands before a process group: its broadcast number `after` waits until all before it have arrived,
    and for `strike`.
    """

    def __init__(self, group, after, strike):
        self._group, self._after, self._strike, self._works = group, after, strike, []

    def broadcast(self, tensor, root):
        if len(self._works) == self._after:
            for work in self._works:
                work.wait()
            time.sleep(0.3)  # the server is in its next broadcast by then
            self._strike()
        self._works.append(self._group.broadcast(tensor, root=root))
        return self._works[-1]


def interrupted(send, group, bucket, strike):
    """`UpdateGroup.send(group, bucket)`, which strikes once half of the bucket has arrived."""
    made, group._group = group._group, Interrupted(group._group, len(bucket) // 2, strike)
    try:
        return send(group, bucket)
    finally:
        group._group = made
