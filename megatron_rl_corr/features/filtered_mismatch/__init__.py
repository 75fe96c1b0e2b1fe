"""The mismatch of groups that --rollout-group-filter leaves out."""
