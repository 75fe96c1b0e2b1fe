"""Checks live rollout servers for train-inference mismatch (`megatron-rl-corr doctor`, and every
run at its start).
"""

from megatron_rl_corr.doctor.findings import DEFECTS, KINDS, Examination, Finding, Row, exit_status
from megatron_rl_corr.doctor.questions import Expected, quick_check

__all__ = ["DEFECTS", "KINDS", "Examination", "Expected", "Row", "Finding", "exit_status", "quick_check"]
