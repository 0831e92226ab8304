"""What a machine, a build of Horovod and a cluster can do, found out in child processes and over ssh. No torch.

`probe` and `agent` collect facts, the modules of findings judge them, `doctor` and `cluster` ask and show.
Start with `doctor`.
"""
