"""What a run writes and reads back: its folder, the journal, the ledger of samples, its history. No torch.

Every file is whole or absent (`durable`). Start with `run_folder`, then `journal`.
"""
