"""A door to a real rollout server: what it sampled once is answered again to whoever asks the same.

So several trainers take their first step on the same samples, while weights still go to the real
server. Each trainer has an id of its own in the names of its weights: what was sampled for one is
answered under the other's.
"""

import asyncio
import json
import re
import threading
from collections import defaultdict

from aiohttp import ClientSession, ClientTimeout, web

ANSWER_HEADERS = ("Content-Type",)
SOME_ID = b"<id>-"
RID = re.compile(rb',"rid":"[0-9a-f]+"')
"""The name of a request, which is its own."""


class ReplayingServer:
    """`url` passes everything on to `target`; within one `replay()` the n-th equal /generate gets
    the n-th sample.
    """

    def __init__(self, target):
        self.target = target
        self.samples = defaultdict(list)
        self.asked = defaultdict(int)
        self.sampled = self.replayed = 0
        self.run_id = None
        """The present trainer's, from the first name that it gave its weights."""

    def replay(self):
        """A new trainer: its first questions are answered as the first trainer's were."""
        self.asked.clear()
        self.run_id = None
        self.sampled = self.replayed = 0

    async def _answer(self, request):
        body = await request.read()
        # What the probe asks after each push, to score and to sample, is of the weights that
        # the server has now.
        generate = request.path == "/generate" and b'"top_logprobs_num"' not in body
        if request.path == "/update_weight_version" and self.run_id is None:
            state, _, name = json.loads(body)["new_version"].rpartition(" ")
            # while a push goes on; other states are of older weights
            if not state or state.startswith("unfinished"):
                self.run_id = name.rpartition("-")[0].encode() + b"-"
        if generate:
            asked = RID.sub(b"", body.replace(self.run_id, SOME_ID))
            turn = self.asked[asked]
            self.asked[asked] += 1
            if turn < len(self.samples[asked]):
                self.replayed += 1
                sample = self.samples[asked][turn].replace(SOME_ID, self.run_id)
                return web.Response(body=sample, content_type="application/json")
        async with self.session.request(
            request.method,
            self.target + request.path_qs,
            data=body or None,
            headers={
                name: value for name, value in request.headers.items() if name in ("Content-Type", "Accept")
            },
        ) as answer:
            content = await answer.read()
            if generate and answer.status == 200:
                self.sampled += 1
                self.samples[asked].append(content.replace(self.run_id, SOME_ID))
            return web.Response(
                body=content,
                status=answer.status,
                headers={name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers},
            )

    async def _start(self):
        self.session = ClientSession(timeout=ClientTimeout(total=300))
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _stop(self):
        await self.runner.cleanup()
        await self.session.close()

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(30)
        return self

    def __exit__(self, *exc_info):
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()
