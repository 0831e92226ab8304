"""Files of a run. Start with `run_folder`, then `journal` (writes) and `history` (reads). Nothing here needs torch."""
