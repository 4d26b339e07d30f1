"""`python -m rollout_audit`."""

from rollout_audit.cli import main

main()
