"""Asks live SGLang servers what their log-probs are of, and names what would mislead the training."""

from megatron_rl_corr.doctor.findings import DEFECTS, KINDS, Examination, Finding, Row, exit_status
from megatron_rl_corr.doctor.quick import Expected, quick_check

__all__ = ["DEFECTS", "KINDS", "Examination", "Expected", "Finding", "Row", "exit_status", "quick_check"]
