"""What a run writes and reads back: its folder, its journal of metrics, the ledger of samples, its history. No torch.

Records of steps and epochs come in from the loop and leave as files that are whole or absent (`durable`). Formats on
disk stay readable for later versions. Start with `run_folder`, then `journal` (writes) and `history` (reads).
"""
