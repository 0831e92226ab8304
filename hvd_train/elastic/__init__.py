"""Elastic jobs: the hosts and workers of a job, when a new world forms, and the driver. No torch.

Start with `roster`, which decides, then `dispatcher`, which acts. `driver` starts them and
Horovod's rendezvous server. `members` holds the reports and decisions of the ranks.
"""
