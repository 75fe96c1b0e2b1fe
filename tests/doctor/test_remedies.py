"""What mends a finding: for each engine in its own flags, and never in another's."""

import re
from pathlib import Path

import pytest

from megatron_rl_corr.config.run import ENGINES
from megatron_rl_corr.doctor import DEFECTS, KINDS
from megatron_rl_corr.doctor.findings import found
from megatron_rl_corr.engines import load_engine

ROOT = Path(__file__).resolve().parents[2]
REMEDIES = {name: load_engine(name).remedies for name in ENGINES}
COMMON = {"--dtype", "--attention-backend", "--enable-return-routed-experts"}
WORDS = {
    "sglang": {
        "SGLang",
        "--model-path",
        "--tokenizer-path",
        "--enable-deterministic-inference",
        "--rl-on-policy-target",
        "--disable-radix-cache",
        "--disable-overlap-schedule",
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        "/flush_cache",
    },
    "vllm": {
        "vLLM",
        "--model",
        "--tokenizer",
        "--logprobs-mode",
        "--return-sampling-mask",
        "--no-enable-prefix-caching",
        "--worker-extension-cls",
        "--weight-transfer-config",
        "VLLM_BATCH_INVARIANT",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_USE_V2_MODEL_RUNNER",
        "/reset_prefix_cache",
        "clear_cache",
    },
}
"""Names, flags, variables and endpoints that one engine has and the other lacks."""


def words_of(text):
    """Flags, variables, endpoints and names in a text."""
    return set(
        re.findall(r"--[a-z][a-z0-9-]*|[A-Z]+_[A-Z0-9_]+|(?<= )/[a-z_]+|clear_cache|SGLang|vLLM", text)
    )


def test_defects_when_listed_then_each_has_a_known_kind_and_a_remedy_for_each_engine():
    assert all(defect.kind in KINDS and defect.means for defect in DEFECTS.values())
    for remedies in REMEDIES.values():
        assert list(remedies) == list(DEFECTS) and all(remedies.values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", DEFECTS)
def test_remedy_when_it_names_a_flag_then_ours_or_one_of_that_engine(engine, name):
    flags = (ROOT / "docs/reference/flags.md").read_text()  # held equal to the parser
    remedy = REMEDIES[engine][name]
    for word in words_of(remedy):
        assert f"`{word}" in flags if word.startswith("--rollout-") else word in WORDS[engine] | COMMON, word
    finding = found("check", name, "so").finding("http://a:1", REMEDIES[engine])
    assert finding.remedy == remedy and str(finding).endswith(f"({finding.kind} mismatch): so; {remedy}")


def test_words_when_two_engines_are_compared_then_no_remedy_could_hold_anothers():
    assert set(WORDS) == set(ENGINES) and not WORDS["sglang"] & WORDS["vllm"]
    used = {engine: set().union(*map(words_of, remedies.values())) for engine, remedies in REMEDIES.items()}
    assert all(WORDS[engine] <= used[engine] for engine in ENGINES)  # none is left from a remedy that is gone


def test_doctor_when_its_texts_are_read_then_none_names_what_only_one_engine_has():
    for path in (ROOT / "megatron_rl_corr/doctor").glob("*.py"):
        texts = [line for line in path.read_text().splitlines() if "#" not in line and "e.g." not in line]
        named = words_of("\n".join(texts)) & (WORDS["sglang"] | WORDS["vllm"])
        assert named <= {"--model", "SGLang"}, (path.name, named)  # --model is the doctor's own flag as well


def test_defects_when_documented_then_the_page_has_every_one_with_its_kind_and_remedies():
    page = (ROOT / "docs/guides/doctor.md").read_text()
    documented = [line for line in page.splitlines() if line.startswith("| `") and line.count(" | ") == 4]
    assert documented == [
        f"| `{name}` | {d.kind} | {d.means} | {' | '.join(remedies[name] for remedies in REMEDIES.values())} "
        "|"
        for name, d in DEFECTS.items()
    ]
