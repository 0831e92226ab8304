"""The files of a run: folder, journal, ledger and history.

No torch. Start with `run_folder`, then `journal`.
"""
