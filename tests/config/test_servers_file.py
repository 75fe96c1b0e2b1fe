"""Flags of servers that come and go: sources, what needs them, and what they do not go with."""

import pytest

from megatron_rl_corr.config.run import RunConfig

GIVEN = {
    "prompts": ("p.jsonl",),
    "reward_function": ("length",),
    "hf_checkpoint": "/models/policy",
    "group_size": 4,
    "max_new_tokens": 8,
}


def made(**options):
    return RunConfig(**(GIVEN | options))


def test_servers_file_when_given_alone_then_no_url_is_needed_and_the_rest_has_its_usual_values():
    run = made(servers_file=("fleet.txt",))
    assert (run.urls, run.servers_poll_s, run.servers_drain_s, run.servers_wait_s) == ((), 2.0, 30.0, 1800.0)
    arguments = run.client_arguments()
    assert arguments["changes"] and arguments["outage_timeout_s"] == 1800.0
    assert not {name for name in arguments if name.startswith("servers_")}
    fixed = made(urls=("http://a:1",)).client_arguments()
    assert "changes" not in fixed and fixed["outage_timeout_s"] == 10.0


def test_urls_when_neither_they_nor_a_source_are_given_then_refused():
    with pytest.raises(ValueError, match="`urls` is required"):
        made()


@pytest.mark.parametrize("name", ["servers_poll_s", "servers_drain_s", "servers_wait_s"])
def test_times_when_no_source_is_given_then_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` 5 has no effect without `servers_file`"):
        made(urls=("http://a:1",), **{name: 5.0})


@pytest.mark.parametrize("source", ["fleet.txt", "/nodes", "dns://fleet:30000", "https://router:30000/"])
def test_source_when_it_is_one_then_taken(source):
    assert made(servers_file=(source,)).servers_file == (source,)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("dns://fleet", "is dns://NAME:PORT"),
        ("dns://:30000", "is dns://NAME:PORT"),
        ("http://key@router:1", "must not hold a password"),
        ("file://fleet.txt", "a source of servers is a file, a folder"),
        (" ", "a source of servers is a file, a folder"),
    ],
)
def test_source_when_it_is_none_then_refused_by_name(source, says):
    with pytest.raises(ValueError, match=f"`servers_file`: .*{says}"):
        made(servers_file=(source,))


def test_servers_file_when_servers_have_turns_with_the_trainer_then_refused():
    with pytest.raises(ValueError, match="`servers_file` with `colocate`"):
        made(servers_file=("fleet.txt",), colocate=True, weight_transport="tensor")
