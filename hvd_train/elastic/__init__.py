"""Who is in the world of an elastic job and when a new one forms; the driver, and what keeps a job going. No torch.

`members` and `roster` decide and are pure; `driver` (beside the launcher) and `supervisor` (around it) act.
Start with `roster`; docs/change-of-world.md tells a change from beginning to end.
"""
