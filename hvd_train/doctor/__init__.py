"""What a machine, a build of Horovod and a cluster can do. No torch.

`machine` has the list of checks of this machine, whose facts come from `children` that answer `questions`. `cluster`
has the checks of hosts, whose facts come from an `agent` on each. Start with `machine`.
"""
