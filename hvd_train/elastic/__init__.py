"""Who is in the world of an elastic job and when a new one forms; the driver, and what keeps a job going. No torch.

Lists of hosts and messages of workers go in; processes, ranks and answers come out. Start with `roster`, which decides
(with `repeated_errors` and `failed_meetings`, as `members` does among the ranks; all are pure), then `dispatcher`,
which acts. `driver` puts them into Horovod's launcher, and `supervisor` runs around it. docs/change-of-world.md follows
one change through the code.
"""
