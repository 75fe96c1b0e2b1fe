"""Compares corrections on samples that a run saved."""
