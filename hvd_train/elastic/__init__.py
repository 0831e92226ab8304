"""Elastic jobs: the hosts and workers of a job, when a new world forms, the driver and its supervisor. No torch.

Start with `roster`, which decides, then `dispatcher`, which acts. `driver` puts them into Horovod's launcher, and
`supervisor` restarts that launcher. `members` holds the reports and decisions of the ranks.
"""
