"""Metric families, one a file: which statistics are kept, what they are called, and how they are read.

A family is a dataclass of statistics with `update(batch)`, `merge(other)` and `section(...)`. AuditState keeps each
twice: over everything, which is what verl logs, and over what an auditor would count (finite tokens, rows with a
valid token). `section` puts both side by side.
"""
