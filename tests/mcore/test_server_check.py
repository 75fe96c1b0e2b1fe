"""What a run does with what the doctor finds at its start."""

import pytest

from megatron_rl_corr.mcore.refusal import Refusal
from megatron_rl_corr.mcore.server_check import judge
from megatron_rl_corr.rollout.doctor import Finding

SEMANTIC = Finding("temperature_ignored", "http://a:1", "slope 1.00 where 0.50 is right")
INFERENCE = Finding("dtype_differs", "http://b:2", "float16 against bfloat16")


@pytest.mark.parametrize(
    ("findings", "kind", "fatal", "told"),
    [
        ([], "all", [], []),
        ([INFERENCE], "semantic", [], [INFERENCE]),
        ([INFERENCE], "all", [INFERENCE], []),
        ([INFERENCE, SEMANTIC], "semantic", [SEMANTIC], [INFERENCE]),
        ([INFERENCE, SEMANTIC], "all", [INFERENCE, SEMANTIC], []),
    ],
)
def test_findings_when_judged_then_the_fatal_ones_refuse_and_the_others_are_told(findings, kind, fatal, told, capsys):
    error = judge(findings, kind)
    assert capsys.readouterr().err.splitlines() == [f"[rollout] {finding}" for finding in told]
    if not fatal:
        assert error is None
        return
    assert isinstance(error, Refusal) and str(error).endswith("--rollout-server-check off")
    assert [finding for finding in findings if f"{finding.server}: {finding.name}" in str(error)] == fatal
    assert all(finding.remedy in str(error) for finding in fatal)
