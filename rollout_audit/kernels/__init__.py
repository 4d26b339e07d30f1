"""Pure functions on tensors: the formulas, with their sources. No state, no masks, no files.

Legend: N valid tokens of a chunk (packed, row after row), B its sequences. float64, natural log.
log ratio = train - rollout log-prob; positive means that the trainer finds the token more likely.
"""
