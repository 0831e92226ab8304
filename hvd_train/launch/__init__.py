"""How processes are started, found and named: launchers, host files, Slurm, the roll call before ranks meet. No torch.

The environment of a process and the launcher's key-value store go in; ranks, sizes and one clear error come out.
Start with `launcher`, then `roll_call`.
"""
