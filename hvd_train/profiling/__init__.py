"""Chosen steps of all ranks and of Horovod in one trace for Perfetto, with a summary. Start with `profile`."""
