"""Chosen steps as all ranks and Horovod saw them, in one trace. Start with `profile`."""
