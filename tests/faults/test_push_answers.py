"""A proxy before a server answers one request of a push with a page of its own, and the
push still arrives.
"""

import pytest

from megatron_rl_corr.engines.errors import UnreadableAnswer
from tests.faults.door import Door
from tests.faults.drills import RUNS_ALL, drill
from tests.faults.pushing_trainer import Trainer

REQUESTS = (
    "/pause_generation",
    "/update_weight_version",
    "/begin_weight_update",
    "/server_info",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/flush_cache",
    "/weights_checker",
    "/continue_generation",
)
CASES = [(REQUESTS[5], sent) for sent in (True, False)]
if RUNS_ALL:
    CASES += [(path, sent) for path in REQUESTS if path != REQUESTS[5] for sent in (True, False)]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def door(sglang_server_fp32):
    door = Door(sglang_server_fp32.url)
    yield door
    door.close()


@pytest.fixture(scope="module")
def trainer(door, vllm_server_fp32, tiny_moe_dir):
    trainer = Trainer([door.url, vllm_server_fp32.url], tiny_moe_dir)
    yield trainer
    trainer.close()


@drill(
    "a proxy answers one request of a push with HTTP 200 and a page; the server got the request, or not",
    promised="everything is sent once more, to all servers; afterwards all have the new weights",
)
@pytest.mark.parametrize(("path", "sent"), CASES, ids=lambda one: {True: "done", False: "lost"}.get(one, one))
def test_push_when_one_answer_is_a_page_then_it_is_repeated_and_all_servers_have_the_weights(
    trainer, door, caplog, seen, path, sent
):
    usual = trainer.push()
    if path == "/init_weights_update_group":
        trainer.servers.close()  # else there is a group already
    door.spoiled = {path: sent}
    struck = trainer.push()
    assert not door.spoiled
    assert caplog.text.count("sending the weights again to") == 1
    trainer.check(*trainer.client.base_urls)
    seen(f"a push took {usual:.1f} s, the struck one {struck:.1f} s")


@drill(
    "every answer to a request of pushes is a proxy's page",
    promised="the run ends by name, the servers go on",
)
def test_push_when_every_answer_is_a_page_then_the_run_ends_by_name_and_servers_sample(trainer, door, seen):
    class Always(dict):
        def pop(self, path, default):
            return self.get(path, default)

    trainer.push()
    door.spoiled = Always({"/update_weights_from_distributed": False})
    with pytest.raises(
        UnreadableAnswer, match="broke the protocol of /update_weights_from_distributed"
    ) as raised:
        trainer.push()
    door.spoiled = {}
    assert raised.value.url == door.url
    trainer.push()  # as a trainer that is started again would
    trainer.check(*trainer.client.base_urls)
    seen(str(raised.value)[:120])
