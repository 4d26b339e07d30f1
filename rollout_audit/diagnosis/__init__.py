"""Findings: one rule, one function; evidence from statistics, a code, a remedy. Healthy data give none."""
