"""What a machine, a build of Horovod and a cluster can do, found out in child processes and over ssh. No torch.

`doctor` examines this machine: it puts `questions` to `children`, and `findings` and `horovod_findings` judge the
answers. `cluster` examines hosts: an `agent` on each collects facts, and `cluster_findings` judges them. What leaves
the room is a list of findings. Start with `doctor`.
"""
