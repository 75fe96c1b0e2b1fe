"""Addresses of rollout servers and the key for them: what they must look like."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_rl_corr.config.problems import Refusal, check_each, problems_of


def checked_urls(base_urls: Sequence[str]) -> tuple[str, ...]:
    """The addresses without a trailing slash.

    Raises:
        ValueError: no address, one that is no http(s)://HOST:PORT, or one that is given twice.
    """
    if isinstance(base_urls, str) or not base_urls:
        raise ValueError(f"base_urls must be a non-empty list of server addresses, got {base_urls!r}")
    urls = tuple(url.rstrip("/") for url in base_urls)
    check_each(_check_url, urls)
    if len(set(urls)) != len(urls):
        raise ValueError(f"a server address is given twice: {', '.join(urls)}")
    return urls


def _check_url(url: str) -> None:
    if "@" in url:
        raise ValueError(
            f"the address of {url.rpartition('@')[2]} must not hold a password; name the environment "
            "variable of the key in `api_key_env`"
        )
    if not _is_address(url):
        raise ValueError(f"a server address is http://HOST:PORT or https://HOST:PORT, got {url!r}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that is not closed
        return False
    return right and not parts.query and not parts.fragment and not any(sign.isspace() for sign in url)


DNS = "dns://"
"""Begins a source of servers that is a name."""


def is_router(source: str) -> bool:
    """True if a source of servers is the address of a router."""
    return source.startswith(("http://", "https://"))


def check_source(source: str) -> None:
    """ValueError for a source of servers that is no file, folder, dns://NAME:PORT or address of a router.

    Files and folders need not be there yet.
    """
    if is_router(source):
        _check_url(source.rstrip("/"))
        return
    if source.startswith(DNS):
        if not _is_address(source.replace(DNS, "http://", 1)) or urlsplit(source).port is None:
            raise ValueError(f"a name of servers is dns://NAME:PORT, got {source!r}")
        return
    if "://" in source or not source.strip():
        raise ValueError(
            "a source of servers is a file, a folder, dns://NAME:PORT or http(s)://ROUTER:PORT, got "
            f"{source!r}"
        )


def is_key(key: str) -> bool:
    """True if a header can carry it."""
    return key.isascii() and key.isprintable() and key.strip() == key != ""


def check_urls_of(option: str, urls: Sequence[str]) -> None:
    """ValueError that names the option, in backticks, for addresses that can't be servers'; none
    at all are right.
    """
    if urls:
        try:
            checked_urls(urls)
        except ValueError as error:
            raise Refusal(f"{option}: {text}" for text in problems_of(error)) from None
