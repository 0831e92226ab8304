"""Elastic jobs: the hosts and workers of a job, when a new world forms, the driver and its supervisor. No torch.

Start with `roster`, which decides (with `repeated_errors`, as `members` does among the ranks; all are pure), then
`dispatcher`, which acts. `driver` puts them into Horovod's launcher, and `supervisor` restarts that launcher.
"""
