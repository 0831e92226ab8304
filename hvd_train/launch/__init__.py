"""How processes are started, found and named: launchers, host files, Slurm, the roll call.

No torch.

Start with `launcher`, then `roll_call`.
"""
