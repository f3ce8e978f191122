"""Policies run over recorded traces: replay, the oracle, and tuning."""
