"""Images and labels: where they come from (`sources`), what is done to them (`augment`), how they arrive (`loader`)."""
