"""Steering servers that misbehave, and what the client keeps to itself."""

import asyncio
import json
import shutil
import ssl
import subprocess

import pytest
from aiohttp import web

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.rollout import (
    LoopThread,
    RolloutClient,
    RolloutOutage,
    RolloutServerError,
    SamplingParams,
)
from tests.virtual_time import run_client

SECRET = "sk-do-not-show"
ONE = SamplingParams(1)


def test_control_when_all_slots_are_taken_by_samples_then_not_kept_waiting(faulty):
    release, full, asked = asyncio.Event(), asyncio.Event(), 0

    async def handle(request):
        nonlocal asked
        if request.path == "/generate":
            asked += 1
            if asked == 200:
                full.set()
            await release.wait()
            return await faulty.good(request)
        release.set()
        return web.json_response({"status": "ok"})

    async def scenario(client):
        samples = asyncio.create_task(client.generate([[1]] * 300, ONE))
        await full.wait()
        assert await client.pause_generation("retract") == [{"status": "ok"}]
        return await samples

    assert len(faulty.run(scenario, handle, max_concurrency=200)) == 300


@pytest.mark.parametrize(
    ("ask", "arguments"),
    [("weights_checker", []), ("update_weights_from_disk", ["/folder"]), ("end_weight_update", [])],
)
def test_control_when_it_reads_or_writes_all_weights_then_the_bound_of_updates_holds(faulty, ask, arguments):
    async def slow(request):
        await asyncio.sleep(0.8)
        return web.json_response({"success": True})

    async def scenario(client):
        for control in (client, client.control(client.base_urls)):
            assert await getattr(control, ask)(*arguments)
            with pytest.raises(RolloutServerError, match="timed out after 0.2 s"):
                await control.flush_cache()

    async def impatient(client):
        with pytest.raises(RolloutServerError, match="timed out after 0.3 s"):
            await getattr(client, ask)(*arguments)

    faulty.run(scenario, slow, timeout_s=0.2, update_timeout_s=10)
    faulty.run(impatient, slow, timeout_s=10, update_timeout_s=0.3)


def test_flush_when_the_server_is_busy_for_a_moment_then_asked_again(faulty):
    answers = [400, 400, 200]

    async def handle(request):
        return web.Response(status=answers.pop(0), text="Cache flushed")

    async def scenario(client):
        await client.flush_cache()

    faulty.run(scenario, handle)
    assert answers == []


@pytest.mark.parametrize("status", [400, 500])
def test_flush_when_the_server_stays_busy_or_fails_then_raised(faulty, status):
    asked = 0

    async def handle(request):
        nonlocal asked
        asked += 1
        return web.Response(status=status, text="Flush cache failed.")

    async def scenario(client):
        control = client.control(client.base_urls)
        with pytest.raises(RolloutServerError, match=f"HTTP {status}") as error:
            await control.flush_cache_of(client.base_urls[0], timeout_s=0.3)
        assert getattr(error.value, "__notes__", []) == (
            ["waited 0.3 s for it to be idle: does another client sample from it?"] if status == 400 else []
        )

    faulty.run(scenario, handle)
    assert (asked > 1) == (status == 400)


def test_flush_with_a_limit_when_the_server_is_silent_then_it_holds_for_the_request_too(faulty):
    async def silent(request):
        await asyncio.sleep(2)
        return web.Response(text="Cache flushed")

    async def scenario(client):
        control = client.control(client.base_urls)
        with pytest.raises(RolloutServerError, match=r"timed out after 0\.[0-9]+ s"):
            await control.flush_cache_of(client.base_urls[0], timeout_s=0.3)

    faulty.run(scenario, silent, timeout_s=60)


@pytest.mark.parametrize("is_busy", [True, False])
def test_control_when_a_server_gives_no_sign_of_life_then_a_request_fails_that_a_busy_one_may_take_long_for(
    is_busy,
):
    over = asyncio.Event()

    async def handle(request):
        if request.path == "/pause_generation":
            await (asyncio.sleep(1.5) if is_busy else over.wait())
        elif not is_busy:
            await over.wait()
        return web.json_response({"status": "ok"})

    async def scenario(client):
        now = asyncio.get_running_loop().time
        begun = now()
        try:
            asked = client.control(client.base_urls).pause_generation("retract")
            if is_busy:
                assert await asked == [{"status": "ok"}]
            else:
                words = (
                    "did not answer POST /pause_generation: nor GET /model_info meanwhile .timed out "
                    "after 0.4 s"
                )
                with pytest.raises(RolloutServerError, match=words):
                    await asked
        finally:
            over.set()
        return now() - begun

    # The busy one answers after 1.5 s; the other is asked for a sign of life after 0.1 s, which
    # it has 0.4 s for.
    took = run_client(scenario, handle, timeout_s=60, read_timeout_s=0.4)
    assert took == pytest.approx(1.5 if is_busy else 0.5)


def test_update_when_a_server_hangs_then_it_costs_the_first_one_its_time_and_the_next_ones_next_to_none(
    faulty, monkeypatch
):
    well, limits, ask = asyncio.Event(), [], ServerControl.ask

    async def noted(self, url, request, *, timeout_s=None):
        limits.append((url, timeout_s))
        return await ask(self, url, request, timeout_s=timeout_s)

    monkeypatch.setattr(ServerControl, "ask", noted)

    async def hangs(request):
        await well.wait()
        return await fresh(request)

    async def fresh(request):
        return web.json_response({"weight_version": "1"})

    async def scenario(client):
        async def asked():
            """The versions, and how long each request to the server that hangs might take."""
            limits.clear()
            return await client.versions_for_update(), [limit for url, limit in limits if url == hung]

        hung = client.base_urls[1]
        assert await asked() == (["1", None], [3.0])
        await client.expect_version("2", missed=[hung])
        for _ in range(2):  # 0.3 s each, whatever the machine takes beside
            assert await asked() == (["1", None], [0.3])
        assert client.counts()["left_out"] == 1
        well.set()
        while hung in client._health.silent:  # it is asked again and again, and has other weights
            await asyncio.sleep(0.02)
        assert await asked() == (["1", "1"], [3.0])

    faulty.run(scenario, fresh, hangs, read_timeout_s=3.0)


def test_update_when_a_server_that_hung_answers_then_it_has_the_usual_time_though_its_own_probe_hangs_still(
    monkeypatch,
):
    """As one that was stopped while it was paused, and goes on: /health answers after the pause only."""
    state, limits, ask = {"hangs": True}, [], ServerControl.ask

    async def noted(self, url, request, *, timeout_s=None):
        limits.append((url, timeout_s))
        return await ask(self, url, request, timeout_s=timeout_s)

    monkeypatch.setattr(ServerControl, "ask", noted)

    async def hung(request):
        if request.path == "/health" or state["hangs"]:
            await asyncio.sleep(25)
        return web.json_response({"weight_version": "1"})

    async def fresh(request):
        return web.json_response({"weight_version": "1"})

    async def scenario(client):
        async def limit_of(versions):
            limits.clear()
            assert await client.versions_for_update() == versions
            return [limit for url, limit in limits if url == client.base_urls[1]]

        assert await limit_of(["1", None]) == [3.0]
        await client.expect_version("2", missed=client.base_urls[1:])
        assert await limit_of(["1", None]) == [0.3]
        state["hangs"] = False
        assert await limit_of(["1", "1"]) == [0.3]
        assert await limit_of(["1", "1"]) == [3.0]  # the push is repeated, or the next one comes
        state["hangs"] = True
        assert await limit_of(["1", None]) == [3.0]
        assert await limit_of(["1", None]) == [0.3]
        state["hangs"] = False
        assert await limit_of(["1", "1"]) == [0.3]
        await client.expect_version("3", missed=client.base_urls[1:])  # it fell out of this one
        assert client._health.silent == [client.base_urls[1]]

    run_client(scenario, fresh, hung, read_timeout_s=3.0)


def test_update_when_a_server_hangs_behind_a_proxy_with_a_limit_then_later_ones_cost_little(
    faulty, monkeypatch
):
    limits, ask = [], ServerControl.ask

    async def noted(self, url, request, *, timeout_s=None):
        limits.append((url, timeout_s))
        return await ask(self, url, request, timeout_s=timeout_s)

    monkeypatch.setattr(ServerControl, "ask", noted)

    async def gateway(request):
        await asyncio.sleep(0.5)
        return web.Response(status=504)

    async def fresh(request):
        return web.json_response({"weight_version": "1"})

    async def scenario(client):
        hung = client.base_urls[1]
        assert await client.versions_for_update() == ["1", None]
        await client.expect_version("2", missed=[hung])
        # its proxy's answer, later
        while not client._pool.left_out or client._pool.left_out[0].refused is None:
            await asyncio.sleep(0.02)
        limits.clear()
        assert await client.versions_for_update() == ["1", None]
        assert [limit for url, limit in limits if url == hung] == [0.3]

    faulty.run(scenario, fresh, gateway, read_timeout_s=3.0)


def test_control_when_one_server_fails_then_the_others_are_asked_too_and_the_error_names_it(faulty):
    asked = []

    async def bad(request):
        return web.json_response({"success": False, "message": "no such mode"})

    async def slow(request):
        await asyncio.sleep(0.2)
        asked.append(request.path)
        return web.json_response({})

    async def scenario(client):
        with pytest.raises(RolloutServerError, match="no such mode") as error:
            await client.continue_generation()
        assert error.value.url == client.base_urls[0]

    faulty.run(scenario, bad, slow)
    assert asked == ["/continue_generation"]


def test_control_when_several_servers_fail_then_the_other_failures_are_notes(faulty):
    async def bad(request):
        return web.Response(status=500, text="down")

    async def scenario(client):
        with pytest.raises(RolloutServerError) as error:
            await client.pause_generation("abort")
        (note,) = error.value.__notes__
        assert note.startswith(f"also: rollout server {client.base_urls[1]} answered")

    faulty.run(scenario, bad, bad)


def test_reported_versions_when_a_server_does_not_answer_then_none_and_when_none_does_then_error(faulty):
    async def well(request):
        return web.json_response({"weight_version": "7"})

    async def gone(request):
        request.transport.close()

    async def wrong(request):
        return web.Response(status=401, text="no key")

    async def proxied(request):
        return web.Response(status=502, text="Bad Gateway")

    async def versions(client):
        return await client.reported_versions()

    assert faulty.run(versions, gone, well) == faulty.run(versions, proxied, well) == [None, "7"]
    with pytest.raises(RolloutServerError, match="closed the connection"):
        faulty.run(versions, gone, gone)
    with pytest.raises(RolloutServerError, match="HTTP 401: no key"):
        faulty.run(versions, well, wrong)
    with pytest.raises(RolloutServerError, match="HTTP 502: Bad Gateway"):
        faulty.run(versions, proxied, proxied)


def test_buckets_when_they_follow_each_other_then_on_one_connection_and_any_other_request_on_its_own(faulty):
    ports = []

    async def handle(request):
        ports.append((request.path, request.transport.get_extra_info("peername")[1]))
        return web.json_response({"success": True, "status": "ok"})

    async def scenario(client):
        for _ in range(3):
            await client.update_weights_from_distributed(["w"], ["bfloat16"], [[2]], group_name="g")
        for _ in range(2):
            await client.pause_generation("retract")

    faulty.run(scenario, handle)
    buckets = [port for path, port in ports if path == "/update_weights_from_distributed"]
    others = [port for path, port in ports if path == "/pause_generation"]
    assert len(set(buckets)) == 1 and len(buckets) == 3
    assert len({*others, *buckets}) == 3


def test_buckets_when_servers_are_asked_the_same_then_the_body_is_made_once(faulty, monkeypatch):
    made = []
    monkeypatch.setattr("orjson.dumps", lambda body, **_: made.append(body) or json.dumps(body).encode())

    async def handle(request):
        return web.json_response({"success": True, "status": "ok"})

    async def scenario(client):
        await client.update_weights_from_distributed(["w"], ["bfloat16"], [[2]], group_name="g")
        await client.pause_generation("retract")

    faulty.run(scenario, handle, handle)
    assert len(made) == 2


def test_weight_group_when_one_server_refuses_then_the_error_does_not_wait_for_the_others(faulty):
    async def refuses(request):
        return web.json_response({"success": False, "message": "port in use"}, status=400)

    async def waits(request):
        await asyncio.sleep(30)

    async def scenario(client):
        # the scenario may take 20 s, the other answer 30
        with pytest.raises(RolloutServerError, match="port in use"):
            await client.init_weights_update_group("127.0.0.1", 1, group_name="g", backend="gloo")

    faulty.run(scenario, waits, refuses)


def test_weight_group_when_two_servers_have_two_ranks_each_then_offsets_follow_on(faulty):
    seen = {}

    def server(number):
        async def handle(request):
            body = await request.json()
            seen[number] = (body["rank_offset"], body["world_size"])
            return web.json_response({"success": True})

        return handle

    async def scenario(client):
        await client.init_weights_update_group(
            "127.0.0.1", 1, group_name="g", backend="nccl", ranks_per_server=2
        )

    faulty.run(scenario, server(0), server(1))
    assert seen == {0: (1, 5), 1: (3, 5)}  # the trainer is rank 0 of 1 + 2 * 2


def test_weight_session_when_no_server_has_one_then_false_and_when_one_has_then_true(faulty):
    async def without(request):
        return web.json_response({"detail": "Not Found"}, status=404)

    async def with_session(request):
        return web.json_response({"success": True})

    async def scenario(client):
        return await client.begin_weight_update(), await client.end_weight_update()

    assert faulty.run(scenario, without) == (False, False)
    assert faulty.run(scenario, without, with_session) == (True, True)


def test_weight_session_when_a_server_that_had_one_answers_404_then_it_is_no_older_server(faulty):
    """As an ingress does that is being loaded anew: the session would stay open, and what its end
    does be left out.
    """

    async def flaky(request):
        if request.path == "/end_weight_update":
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"success": True})

    async def scenario(client):
        assert await client.control(client.base_urls).begin_weight_update()
        with pytest.raises(RolloutServerError, match="/end_weight_update with HTTP 404"):
            await client.control(client.base_urls).end_weight_update()

    faulty.run(scenario, flaky)


def test_api_key_when_given_then_sent_as_bearer_and_shown_nowhere(faulty):
    seen = []

    async def handle(request):
        seen.append(request.headers["Authorization"])
        return web.Response(status=401, text=f"bad key {SECRET}")

    async def scenario(client):
        with pytest.raises(RolloutServerError) as error:
            await client.generate([[1]], ONE)
        return str(error.value) + repr(error.value) + repr(client) + repr(vars(client))

    shown = faulty.run(scenario, handle, api_key=SECRET)
    assert seen == [f"Bearer {SECRET}"]
    assert SECRET not in shown and "HTTP 401: bad key ***" in shown and "--api-key" in shown


@pytest.mark.parametrize("key", [SECRET + "\n", "", " " + SECRET, SECRET + "ü"])
def test_api_key_when_a_header_cannot_carry_it_then_refused_without_showing_it(key):
    with pytest.raises(ValueError, match="api_key must be printable ASCII") as error:
        RolloutClient(["http://a:1"], vocab_size=10, api_key=key)
    assert SECRET not in str(error.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key, and a certificate of 127.0.0.1 that it signed itself: for a server, and to trust that server."""
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "cert.pem"
    of_loopback = "-days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes {of_loopback}".split()
    subprocess.run([*command, "-keyout", key, "-out", pem], check=True, capture_output=True)
    return key, pem


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_when_the_authority_is_given_then_trusted_and_else_refused(faulty, certificate):
    key, pem = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pem, key)

    async def scenario():
        async with faulty.serving(faulty.good, ssl_context=tls) as url:
            async with RolloutClient([url], vocab_size=10, ca_file=pem) as client:
                assert len(await client.generate([[1]], ONE)) == 1
            async with RolloutClient([url], vocab_size=10, outage_timeout_s=0.1) as client:
                with pytest.raises(RolloutOutage, match="(?i)certificate verify failed"):
                    await client.generate([[1]], ONE)

    asyncio.run(scenario())


def test_ca_file_when_it_has_no_effect_or_is_none_then_refused(tmp_path):
    with pytest.raises(ValueError, match="has no effect: no server address is https"):
        RolloutClient(["http://a:1"], vocab_size=10, ca_file="ca.pem")
    wrong = tmp_path / "ca.pem"
    with pytest.raises(ValueError, match="is not a PEM file of certificates: .*No such file"):
        RolloutClient(["https://a:1"], vocab_size=10, ca_file=wrong)
    wrong.write_text("no certificate")
    with pytest.raises(ValueError, match="is not a PEM file of certificates"):
        RolloutClient(["https://a:1"], vocab_size=10, ca_file=wrong)


def test_proxy_when_the_environment_names_one_then_not_used(faulty, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    assert len(faulty.run(lambda client: client.generate([[1]], ONE), faulty.good)) == 1


def test_wait_healthy_when_the_server_comes_up_later_then_returns_and_else_says_how_long_it_waited(faulty):
    asked = 0

    async def starting(request):
        nonlocal asked
        asked += 1
        return web.Response(status=503 if asked < 3 else 200)

    faulty.run(lambda client: client.wait_healthy(10), starting)
    assert asked == 3

    async def never(request):
        return web.Response(status=503)

    async def scenario(client):
        with pytest.raises(RolloutServerError, match="GET /health with HTTP 503.*see its log") as error:
            await client.wait_healthy(0.7)
        assert error.value.__notes__ == ["waited 0.7 s for it to become healthy"]

    faulty.run(scenario, never)


@pytest.mark.parametrize(
    "urls, named",
    [
        ([], "non-empty"),
        ("http://a:1", "non-empty list"),
        (["127.0.0.1:30000"], "http://HOST:PORT"),
        (["ftp://a:1"], "http://HOST:PORT"),
        (["http://a:1/", "http://a:1"], "given twice"),
        (["http://a:1x"], "http://HOST:PORT"),
        (["http://a:70000"], "http://HOST:PORT"),
        (["http://[::1:5"], "http://HOST:PORT"),
        ([f"http://user:{SECRET}@a:x"], "must not hold a password"),
        ([f"http://user:{SECRET}@a:1"], "must not hold a password"),
    ],
)
def test_base_urls_when_malformed_then_error_says_how_without_the_password(urls, named):
    with pytest.raises(ValueError, match=named) as error:
        RolloutClient(urls, vocab_size=10)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "option",
    ["vocab_size", "max_concurrency", "max_per_server", "timeout_s", "connect_timeout_s", "read_timeout_s"],
)
def test_client_when_a_bound_is_not_positive_then_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be positive, got 0"):
        RolloutClient(["http://a:1"], **({"vocab_size": 10} | {option: 0}))


@pytest.mark.parametrize("option", ["outage_timeout_s", "max_retries", "max_continuations"])
def test_client_when_a_number_is_negative_then_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 0, got -1"):
        RolloutClient(["http://a:1"], vocab_size=10, **{option: -1})


def test_client_when_used_from_a_second_loop_then_error_says_what_to_do(faulty):
    async def use(client):
        await client.generate([[1]], ONE)

    async def scenario(client):
        await use(client)
        said = "belongs to another event loop: use one LoopThread"
        with LoopThread() as other, pytest.raises(RuntimeError, match=said):
            await asyncio.to_thread(other.call, use(client))

    faulty.run(scenario, faulty.good)
