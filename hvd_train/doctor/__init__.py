"""What a machine, a build of Horovod and a cluster can do. No torch.

Start with `machine`: the checks of this machine, whose facts come from `children`. `cluster` has the checks of hosts,
whose facts come from an `agent` on each.
"""
