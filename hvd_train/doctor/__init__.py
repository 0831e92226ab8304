"""What a machine, a build of Horovod and a cluster can do. No torch."""
